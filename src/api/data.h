#pragma once
#include "standard.h"
#include "context.h"
#include "program.h"
#include "tokenizer.h"

/* ----------------------------------------------------------------------------------------------- datasets */

/* Finds where the text of a file begins: *begin is 0, or the first byte after a UTF-8 byte order mark.
   Returns TT_ERR_FORMAT if the text is not UTF-8, or if more than an eighth of its first 4096 bytes are
   control characters, as in UTF-16. The error sentence names path, line and byte, and says how to convert
   UTF-16, UTF-32 or Latin-1. */
tt_status tt_text_begin(tt_context *ctx, const char *path, const char *text, size_t bytes, size_t *begin);

/* The form of the labels that a model learns, and of its predictions. */
typedef enum tt_task {
    TT_TASK_CLASS,  /* one class for each text or image */
    TT_TASK_LABELS, /* any number of labels for each text: a value of 0 or 1 for each label */
    TT_TASK_SCORES, /* one or more numbers for each text */
    TT_TASK_TAGS,   /* a tag for each word of a text */
    TT_TASK_EMBED,  /* no labels: a dataset has pairs of texts with similar meanings, and the prediction is an
                       embedding of each text */
    TT_TASK_MASKED_LM /* no labels: the loader masks tokens of each text, and the model predicts them */
} tt_task;

/* A set of labelled texts in memory, or of labelled images. Its classes are the classes of TT_TASK_CLASS, the
   labels of TT_TASK_LABELS, the scores of TT_TASK_SCORES or the tags of TT_TASK_TAGS. */
typedef struct tt_dataset tt_dataset;

/* A word of a text: the bytes [begin, end), at least one, and the number of the word's tag. A word with tag
   -1 does not count in the loss. */
typedef struct tt_word { size_t begin, end; int tag; } tt_word;

/* A text, which may contain NULs, perhaps with a second text, and its labels. */
typedef struct tt_text {
    const char *text;
    size_t bytes;
    int label;            /* TT_TASK_CLASS: the number of the class, 0..classes - 1 */
    const char *pair;     /* the second text of a pair; NULL: none */
    size_t pair_bytes;
    const float *values;  /* (classes) TT_TASK_LABELS: 0 or 1 for each label; TT_TASK_SCORES: the numbers;
                             TT_TASK_EMBED: (1) how similar the pair is, or NULL: the pair belongs together */
    const tt_word *words; /* (n_words) TT_TASK_TAGS: words in the order of the text, which do not overlap */
    int n_words;
    const char *negative; /* TT_TASK_EMBED: a text with another meaning, which resembles `text`; NULL: none */
    size_t negative_bytes;
} tt_text;

/* Makes a dataset of the caller's texts, at least one. class_names: (classes) names in UTF-8. The function
   copies everything. With TT_TASK_TAGS texts have no pairs. With TT_TASK_EMBED and TT_TASK_MASKED_LM there
   are no classes (NULL and 0); with TT_TASK_EMBED, every text has a pair, and either all texts or none have a
   negative, and either all or none have `values`. examples/datasets.h reads IMDb's reviews with this
   function. */
tt_dataset *tt_dataset_texts(tt_context *ctx, tt_task task, const tt_text *texts, int64_t count,
                             const char *const *class_names, int classes);

/* Names of the columns of a table, and how fields and labels are separated. */
typedef struct tt_table_options {
    const char *text_column, *label_column; /* Set them if your columns have other names; default NULL: "text"
                                               and "label"; "tokens" and "tags" for TT_TASK_TAGS; "score"
                                               for TT_TASK_EMBED */
    const char *split_column;               /* Set it if the column has another name; default "split". A file
                                               may lack this column */
    const char *pair_column;                /* Set it if the column of second texts has another name; default
                                               "text_pair". A file may lack this column. TT_TASK_TAGS ignores
                                               it */
    const char *negative_column;            /* Set it if the column of negatives, which TT_TASK_EMBED reads,
                                               has another name; default "negative". A file may lack this
                                               column */
    char delimiter;                         /* Set it if another character separates the fields; default 0: a
                                               comma in a .csv file, else a tab */
    bool unquoted;                          /* Set it if double quotes in the file are ordinary characters;
                                               default false */
    tt_task task;                           /* Set it if the labels are not one class for each text; default
                                               TT_TASK_CLASS */
    char label_delimiter;                   /* Set it if another character separates the labels or scores in
                                               one field of a CSV or TSV file; default ',' */
} tt_table_options;
tt_table_options tt_table_options_default(void);

/* Reads a dataset from a table in a text file in UTF-8 (see tt_text_begin). The end of the file's name tells
   the format:
   - .jsonl or .json: each line is a JSON object; its members are the columns.
   - With TT_TASK_TAGS any other file is in the format of CoNLL: a line for each word, which begins with the
     word and ends with its tag; spaces or tabs divide them and the columns between them. An empty line ends
     a sentence, and so does a line that begins with -DOCSTART-. Comments before a sentence are skipped: lines
     that begin with "# " and contain "=", and lines "# newdoc" and "# newpar".
   - .csv, .tsv and others: a header names the columns; quoting is that of RFC 4180.
   Columns are in any order; there may be other columns. Empty lines are skipped. Lines end with LF or CR LF,
   or, in a file without any LF, with CR. Errors name the line.
   The label of a row depends on the task:
   - TT_TASK_CLASS: a word; in JSON a string or a number.
   - TT_TASK_LABELS: words with label_delimiter between them, perhaps none; in JSON a list of strings, or a
     list of 0 and 1 (or false and true), one for each class.
   - TT_TASK_SCORES: numbers with label_delimiter between them, equally many in all rows; in JSON a number or
     a list of numbers.
   - TT_TASK_TAGS: in JSON a list of strings or numbers, one for each string of the list in the text column.
     A space joins the words to a text.
   - TT_TASK_EMBED: none, or a number that says how similar the texts of a pair are, in all rows that are kept
     or in none; a file may lack this column, and a field may be empty (in JSON missing or null). The pair's
     column is required. tt_spearman compares the numbers with cosines; training refuses them.
   - TT_TASK_MASKED_LM: none. A file whose name ends in .txt has no columns: each line that is not empty is a
     text.
   The labels of lists of 0 and 1, and scores, are named LABEL_0, LABEL_1 and so on, unless `classes` names
   them.
   split: the function keeps the rows whose split column has this word; NULL keeps all rows. "validation",
   "valid", "val" and "dev" are synonyms. If split is one of these, "train" or "test", a row with any other
   word is an error. In a file without a split column, "test" is a tenth of the rows of each class, chosen by
   the context's seed, and "train" is the rest. A table that has no rows for validation or test gives a
   dataset of 0 rows, which is no error: take some of "train" with tt_dataset_split.
   classes: labels are numbered in the order of `classes` (n_classes names). With NULL and 0 the function
   numbers the distinct labels of the rows that it keeps, in byte order, or by value if all are numbers, such
   as -1, 0, 2.5, 10. o NULL: defaults. */
tt_dataset *tt_dataset_table(tt_context *ctx, const char *path, const char *split, const char *const *classes,
                             int n_classes, const tt_table_options *o);

/* An image with 8 bits a channel: (height, width, channels), the top row first. */
typedef struct tt_image {
    const uint8_t *pixels;
    int height, width; /* 1..65535 */
    int channels;      /* 1: grey, 2: grey and alpha, 3: red, green, blue, 4: red, green, blue, alpha */
} tt_image;

/* Resizes an image into `to` (height, width, image->channels), which must not overlap the image. The filter
   is bilinear, over a neighbourhood that grows with the reduction (antialiasing). The result equals Pillow's
   Image.resize((width, height), BILINEAR) and therefore torchvision's Resize of a PIL image: first the width
   is resized and rounded to whole grey levels, then the height, with weights of 22 bits. (Versions of Pillow
   after 12.1 sometimes begin with the height and differ by a level; with alpha these versions round
   differently.) With alpha, colours are weighted by alpha. */
tt_status tt_image_resize(tt_context *ctx, const tt_image *image, int height, int width, uint8_t *to);

/* A source of labelled images that the caller reads on request. */
typedef struct tt_image_source {
    int64_t count;
    const int *labels;               /* (count) class of each image, 0..classes - 1; copied */
    const char *const *class_names;  /* (classes) names in UTF-8; copied */
    int classes;
    /* Decodes image `index`, 0..count - 1, of any size and channels. Returns NULL, or words that say why the
       image cannot be decoded. A loader's threads call `read` and `release`, several at a time. */
    const char *(*read)(void *user, int64_t index, tt_image *image);
    void (*release)(void *user, tt_image *image); /* releases an image that `read` has returned, once the
                                                     loader no longer needs the pixels. NULL: images need no
                                                     release */
    const char *(*name)(void *user, int64_t index); /* returns a name for errors, such as a path. NULL: errors
                                                       use the index */
    void *user;
    int height, width, channels; /* size of every image, so that unfit options are refused early; 0: not
                                    known */
} tt_image_source;
/* Makes a dataset of a source's images. examples/datasets.h reads CIFAR-10 by this function. */
tt_dataset *tt_dataset_images(tt_context *ctx, const tt_image_source *source);

/* Moves n texts or images out of d into a new dataset. The number of examples that a class gives is
   proportional to the size of the class; the context's seed determines which texts or images move. */
tt_dataset *tt_dataset_split(tt_dataset *d, int64_t n);
void tt_dataset_free(tt_dataset *d);
int64_t tt_dataset_count(const tt_dataset *d);
tt_task tt_dataset_task(const tt_dataset *d);
/* Returns text i, followed by a NUL; "" for an image. Sets *bytes to its length; bytes may be NULL. */
const char *tt_dataset_text(const tt_dataset *d, int64_t i, size_t *bytes);
/* Returns the second text of pair i, followed by a NUL; NULL if example i is no pair. bytes may be NULL. */
const char *tt_dataset_pair(const tt_dataset *d, int64_t i, size_t *bytes);
/* Returns the negative of text i, followed by a NUL; NULL if it has none. bytes may be NULL. */
const char *tt_dataset_negative(const tt_dataset *d, int64_t i, size_t *bytes);
int tt_dataset_label(const tt_dataset *d, int64_t i); /* returns the number of the text's or image's class; -1
                                                         if the task is not TT_TASK_CLASS */
/* Returns the (classes) values of TT_TASK_LABELS and TT_TASK_SCORES, or the score of a pair of TT_TASK_EMBED;
   NULL if there are none. */
const float *tt_dataset_values(const tt_dataset *d, int64_t i);
/* Returns the (n) words of TT_TASK_TAGS; NULL for other tasks, and then sets *n to 0. */
const tt_word *tt_dataset_words(const tt_dataset *d, int64_t i, int *n);
int tt_dataset_classes(const tt_dataset *d);
const char *tt_dataset_class_name(const tt_dataset *d, int class_index);
/* Sorts n class names as tt_dataset_table numbers labels: in byte order, or by value if all are numbers. */
void tt_sort_class_names(const char **names, int n);
/* Counts the texts or images of each class or label, or the words of each tag. counts: (classes). With
   TT_TASK_SCORES every count is the number of all texts. */
void tt_dataset_counts(const tt_dataset *d, int64_t *counts);
/* Computes weights (classes) with which all classes matter equally. The weight of a class or tag is that of
   "balanced" in scikit-learn: `all / (classes * own)`, where `all` is the number of texts or tagged words,
   and `own` the number of those with this class or tag; 0 if `own` is 0. The weight of a label is the number
   of texts without the label, divided by the number of texts with the label, or 1 if no text has the label.
   Texts with the label have this weight, and all other texts have weight 1. The weights of scores are 1. */
tt_status tt_dataset_weights(const tt_dataset *d, float *weights);

/* Options of a loader of texts. A loader shuffles the dataset by (seed, epoch), sorts it by length within
   windows of `window` batches (longest first), and cuts it into steps of `batch` sequences; then the loader
   shuffles the order of the steps within the window. The last step of an epoch may have fewer sequences. A
   step is one or more micro-batches without padding, filled one after another: each has at most max_seqs =
   ceil(batch / accumulate) sequences and at most max_tokens tokens. max_seqs is lower if the dataset has
   fewer sequences, or if max_tokens / 2 is less.
   With parallel.groups > 1 the loader instead deals out the sequences of a step so that the micro-batches
   have similar numbers of tokens. The number of micro-batches is a multiple of `groups`, as far as there are
   sequences, so that the micro-batches are the same for any number of ranks.
   A pair of texts is one sequence, cut as tt_tokenizer_encode cuts pairs. With TT_TASK_EMBED each text is a
   sequence of its own: `batch` then counts pairs or triplets, and max_seqs of the loader counts sequences. A
   micro-batch of n pairs has n texts, then their n pairs, then perhaps n negatives. Its labels are 0 for a
   text, 1 for a pair and 2 for a negative, and it has the arrays "anchors", i32 (n, 1), the sequences of the
   texts; "candidates", i32 (n or 2 n, 1), the sequences of pairs and negatives; and "positives", i32 (n, 1),
   the place of each text's pair among the candidates.
   With TT_TASK_MASKED_LM the loader masks tokens as BERT's authors do (Devlin et al. 2019). The loader
   chooses a share mask_rate of the tokens of each text at random (rounded, at least one), but no special
   token and no unknown token. 80% of the chosen tokens become TT_TOKEN_MASK, 10% become a token of the
   vocabulary, all equally likely, and 10% do not change. A batch has the arrays "masked", i32 (n, 1),
   the rows of the chosen tokens in rising order, and "targets", i32 (n, 1), their ids before masking; without
   a chosen token, one row with the target -100. The choice depends only on (seed, epoch, index of the text,
   position), so tt_evaluate, which reads epoch 0, always sees the same masks.
   tt_loader_new tokenizes all texts once, on the context's threads (about 100 MB of text a second each), and
   keeps the ids (2 bytes each), so that the loader knows how large its micro-batches become. Keep the dataset
   and the tokenizer until the loader is freed. */
typedef struct tt_loader_options {
    int batch;        /* Set it larger for smoother gradients and faster epochs, with a higher learning rate:
                         the sequences or images of a step; default 16 */
    int accumulate;   /* Set it above 1, up to batch / groups, if a step needs too much memory: the
                         micro-batches that each group has in a step, each of at most ceil(batch /
                         (accumulate * groups)) sequences; default 1 */
    int max_length;   /* Set it to the tokens that the model takes, or lower to save time and memory: longer
                         sequences are cut to this number, [CLS] and [SEP] included; default 512 */
    int max_tokens;   /* Set it if long sequences are rare, so that micro-batches of long sequences need no
                         more memory than others: the largest number of tokens of a micro-batch, >=
                         max_length; default 0: no limit */
    bool shuffle;     /* Clear it for evaluation and prediction, which need the order of the dataset,
                         unsorted; default true */
    int window;       /* Set it to 0 if the texts of a step should be drawn regardless of their lengths: the
                         number of batches that are sorted by length together; default 50; 0 or 1: no
                         sorting */
    bool drop_last;   /* Set it if every step must have `batch` sequences: a last incomplete step is then left
                         out; default false */
    int threads;      /* Set it higher if training waits for images (tt_loader_waited): the threads that
                         prepare images ahead of the trainer, 0..64; 0: tt_loader_next prepares images;
                         default 1 */
    float mask_rate;  /* Set it higher if a large model learns its texts too easily, above 0 and below 1: the
                         share of a text's tokens that TT_TASK_MASKED_LM predicts; default 0.15 */
    bool whole_words; /* Set it if guessing a word from its other tokens is too easy: TT_TASK_MASKED_LM then
                         chooses all tokens of a word or none; default false. A word ends before white space
                         and, with WordPiece, before punctuation. Words are chosen in random order, as long as
                         all their tokens fit into mask_rate of the text */
    tt_parallel parallel; /* Set it if the trainer has several ranks, to the trainer's `parallel` after
                             tt_check_options; default: one group on one rank. The loader reads `groups` and
                             `data` */
} tt_loader_options;
tt_loader_options tt_loader_options_default(void);

/* The filter that weights pixels when an image is resized, with Pillow's numbers. Results equal those of
   Pillow 12.1: later versions sometimes begin with the height, and differ by some levels. */
typedef enum tt_resample { TT_NEAREST, TT_LANCZOS, TT_BILINEAR, TT_BICUBIC } tt_resample;

/* Options of a loader of images, which resizes, pads, crops and flips images, in this order. */
typedef struct tt_image_options {
    int height, width;               /* Set them to the size of the cropped result, 1..65535; there is no
                                        default */
    int channels;                    /* Set it if the model does not read 3 channels: the number of channels,
                                        1..4; default 3. An image must have this number of channels. If the
                                        number is 3, an image may also have 1 channel (grey, copied into all
                                        three) or 4 (alpha is dropped) */
    int resize_height, resize_width; /* Set them if all images should get one size before they are cropped,
                                        whatever their proportions (tt_image_resize), 1..65535; default 0, 0:
                                        not resized */
    int resize_shortest;             /* Set it, instead of resize_height and resize_width, if images should
                                        keep their proportions: the length of the shorter side, 1..65535; the
                                        length of the longer side follows and is rounded down; default 0 */
    tt_resample resample;            /* Set it if the model was trained on images resized with another filter;
                                        default TT_BILINEAR */
    int pad;                         /* Set it, with random_crop, to shift training images at random: the rows
                                        and columns of zeros added on all four sides, 0..65535; default 0 */
    bool random_crop;                /* Set it for training, so that the model sees each image at several
                                        places: all places are equally likely; default false: the crop is
                                        central (if an odd number of rows is cut away, one row less is cut at
                                        the top than at the bottom; columns likewise, with one less at the
                                        left) */
    bool flip;                       /* Set it for training if a mirrored image belongs to the same class:
                                        left and right are exchanged with probability 1/2; default false */
} tt_image_options;
tt_image_options tt_image_options_default(int height, int width);
/* Prepares one image as a loader does, without random_crop and flip, into `to` (height, width, channels). */
tt_status tt_image_prepare(tt_context *ctx, const tt_image *image, const tt_image_options *o, uint8_t *to);

/* Data of one input of a model. */
typedef struct tt_array {
    const char *input; /* the input's name */
    const void *data;  /* (rows, width) in the input's dtype */
    int64_t rows;
} tt_array;

/* A micro-batch. A trainer sets each input of its model to the array with the input's name: an element of
   `arrays`, or else the field of that name. The inputs "first" and "last" get the first and the last row of
   each sequence, from seq_start. Data that no input reads may be missing. Pointers are valid until the next
   call on the loader or source that set the pointers. */
typedef struct tt_batch {
    int seqs;                 /* number of sequences, images or examples. Speeds, such as tokens per second,
                                 count rows, or seqs if rows is 0 */
    int rows;                 /* number of tokens of all sequences together; 0 if the sequences have no
                                 tokens, as images */
    const int32_t *ids;       /* (rows) */
    const int32_t *positions; /* (rows) positions of the tokens: 0, 1, ... within each sequence */
    const int32_t *types;     /* (rows) token types: 0, and in the second text of a pair 1 if the tokenizer's
                                 template says so */
    const int32_t *seq_start; /* (seqs + 1) the first row of each sequence, then `rows` */
    const int32_t *labels;    /* (seqs) TT_TASK_CLASS: the class of each sequence; TT_TASK_EMBED: see
                                 tt_loader_options; other tasks: -1 */
    const float *label_values; /* (seqs, values) values of TT_TASK_LABELS and TT_TASK_SCORES; with
                                  TT_TASK_EMBED the score of each sequence's pair, if pairs have scores; else
                                  NULL */
    int values;               /* number of labels or scores */
    const int32_t *tags;      /* (rows) TT_TASK_TAGS: the tag of a word at its first token, else -100 */
    const int64_t *index;     /* (seqs) number of each text or image in the dataset */
    const uint8_t *pixels;    /* (seqs, image_bytes) */
    int64_t image_bytes;      /* height * width * channels */
    const tt_array *arrays;   /* (n_arrays) data for the inputs of a model of your own */
    int n_arrays;
    bool last_of_step;        /* the next micro-batch belongs to another step */
} tt_batch;

/* Source of a trainer's batches: a loader, or your own functions. Steps of an epoch are numbered from 0. The
   content of a step must depend on its epoch and number alone: then a resumed run sees the same data. */
typedef struct tt_source {
    void *self;                /* argument of the functions */
    /* Goes to the first micro-batch of a step, 0 to `steps`. */
    tt_status (*seek)(void *self, int64_t epoch, int64_t step);
    /* Fills in the next micro-batch, whose fields are all 0 before the call, or sets *more to false at the
       end of the epoch. If `next` fails, tt_fit and tt_evaluate end and return its error. */
    tt_status (*next)(void *self, tt_batch *batch, bool *more);
    /* Number of steps in an epoch, at least 1. If `next` gives more steps, tt_fit and tt_evaluate fail; if it
       gives fewer, the logger gets one warning from tt_fit. The last micro-batch of a step must set
       last_of_step. */
    int64_t steps;
    /* max_seqs, max_tokens: size of the largest micro-batch in sequences and in tokens; 0: unknown.
       accumulates: whether a step may have more micro-batches than the trainer has data ranks.
       tt_train_options_make_room reads all three. */
    int max_seqs, max_tokens;
    bool accumulates;
    /* Returns a hash of all training data, so that a resumed run notices other data. NULL: no check. */
    uint64_t (*hash)(void *self);
    const char *const *class_names; /* (classes) names of the labels; a run cannot be resumed with other
                                       names */
    int classes;                    /* number of class_names; 0: no classes */
    /* Tells the source which data ranks belong to this process. Called before `seek` if there are several
       processes or features_once. Micro-batches go to `data` ranks in order, starting over with each step
       (by_step) or with each epoch; this process has the ranks [first, end). `next` may then give NULL for
       the data of other ranks, with the right numbers of rows. But metrics of predictions need seq_start and
       the labels (labels, label_values or tags) of all ranks in every process. With features_once no rank
       needs data except index, seq_start and the labels. NULL: every process makes all data. */
    void (*deal)(void *self, int data, int first, int end, bool by_step);
    /* Writes lines, each with a newline at its end, about everything that the batches depend on beside `hash`
       and the numbers above; at most `capacity` bytes including the final 0. With several processes, tt_fit
       and tt_evaluate refuse a process whose lines differ from those of process 0, and name the line. NULL:
       no lines. */
    void (*describe)(void *self, char *to, size_t capacity);
    int max_masked; /* largest number of rows of "masked" or "answers" in a micro-batch; 0: unknown, or no
                       such array. tt_train_options_make_room reads it */
    /* Set both if the model trains on pairs of answers (tt_lm_preference_model). reference (pairs): for the
       pair with each index (tt_batch.index of its sequences), the log-probability of the chosen answer minus
       that of the rejected one under the model as it was before training; NaN: unknown. tt_fit computes the
       numbers before its first step (tt_trainer_reference). pairs: their number, 1 + the largest index. */
    float *reference;
    int64_t pairs;
} tt_source;

typedef struct tt_loader tt_loader;
/* Makes a loader of texts, which starts at step 0 of epoch 0. NULL options: defaults. Returns NULL on
   error. */
tt_loader *tt_loader_new(tt_context *ctx, const tt_dataset *d, const tt_tokenizer *k,
                         const tt_loader_options *o);
/* Makes a loader of images, which ignores max_length, max_tokens and window. The loader's threads read images
   and prepare them according to `image`, ahead of the trainer, into a ring of a few micro-batches that is
   allocated here. Crops and flips depend on (seed, epoch, index of the image) alone. An image that cannot be
   read, or that does not fit the options, is an error of its micro-batch; the micro-batches before are still
   delivered. tt_loader_seek to the loader's current place keeps the images prepared ahead. */
tt_loader *tt_image_loader_new(tt_context *ctx, const tt_dataset *d, const tt_image_options *image,
                               const tt_loader_options *o);
void tt_loader_free(tt_loader *l); /* may be called at any time: stops the threads */
int64_t tt_loader_steps(const tt_loader *l); /* steps of an epoch */
/* Return the size that a trainer needs for the loader's texts, as the fields of tt_train_options: max_seqs,
   max_tokens (tokens of the max_seqs longest texts; 0 for images) and compile.accumulate (whether a step may
   have more micro-batches than parallel.data). A trainer for several loaders needs the largest of each. */
int tt_loader_max_seqs(const tt_loader *l);
int tt_loader_max_tokens(const tt_loader *l);
bool tt_loader_accumulates(const tt_loader *l);
int tt_loader_longest(const tt_loader *l); /* tokens of the longest text before the cut; 0 for images */
int64_t tt_loader_cut(const tt_loader *l); /* number of texts longer than max_length, which are cut */
/* Goes to a step of an epoch, both counted from 0. Order and content depend on (seed, epoch, step) alone. */
tt_status tt_loader_seek(tt_loader *l, int64_t epoch, int64_t step);
/* Gives the next micro-batch. Returns false at the end of the epoch and on an error: tt_loader_status then
   returns TT_OK or the error. After the end of an epoch call tt_loader_seek. */
bool tt_loader_next(tt_loader *l, tt_batch *batch);
tt_status tt_loader_status(const tt_loader *l); /* status of the last tt_loader_next */
double tt_loader_waited(const tt_loader *l); /* total seconds that tt_loader_next waited for images */
/* Returns the loader as a trainer's source, valid as long as the loader. Returns NULL if l is NULL. */
const tt_source *tt_loader_source(tt_loader *l);

/* ------------------------------------------------------------------------------------------ token streams */

/* A sequence of tokens for a language model: documents one after another. Each document begins with the
   token that the tokenizer puts before a text, such as LLaMA's <s>, and ends with a token that marks the end
   of the document. If a document's text already spells out these tokens at its ends, the stream does not
   repeat the tokens, and the logger gets a warning. The stream is in memory, or in a file that is read where
   needed. */
typedef struct tt_token_stream tt_token_stream;
typedef struct tt_stream_options {
    const tt_tokenizer *tokenizer; /* Set it if the model reads tokens of a vocabulary; the tokenizer must
                                      outlive the stream; default NULL: tokens are bytes, and 256 ends a
                                      document */
    int end;                       /* Set it if another token than the tokenizer's TT_TOKEN_EOS ends a
                                      document; default -1: TT_TOKEN_EOS */
    int vocab;                     /* Set it to the model's vocabulary size, to refuse a text with an id out
                                      of range; default 0: the tokenizer's size */
    /* Set it if the model was trained without a token before a document; default false: each document begins
       with the token that the tokenizer puts before a text, if there is one */
    bool bare;
    const char *separator;         /* Set it if a text has several documents, to the line that separates them,
                                      such as "<|endoftext|>"; "": one or more empty lines; default NULL: a
                                      text is one document */
    bool all_tokens;               /* Set it if the model should learn all tokens of conversations; default
                                      false: only those of the answers */
} tt_stream_options;
tt_stream_options tt_stream_options_default(void);

/* Makes a stream of a text. With a tokenizer the text must be UTF-8, as in a file (see tt_text_begin);
   without a tokenizer the text may be any bytes. NULL options: defaults. Returns NULL on error. */
tt_token_stream *tt_token_stream_text(tt_context *ctx, const char *text, size_t bytes,
                                      const tt_stream_options *o);
/* Makes a stream of a text file in UTF-8 (see tt_text_begin), or of all files of a folder whose names end in
   .txt, in the order of their names. A file whose name ends in .jsonl has a conversation on each line, which
   becomes a document; empty lines are skipped. A line is a JSON object, in one of three forms:
   - {"messages": [{"role": ..., "content": ...}, ...]}, or "conversations" with "from" and "value", as trl
     reads them: the chat template of the tokenizer's folder writes the text (see tt_tokenizer_chat). The
     tokens of answers are learnt: those that overlap the template's blocks {% generation %}, as
     "assistant_masks" of transformers; in a template without such blocks, those from the end of the prompt to
     the end of what the template writes for a message of the role "assistant".
   - {"prompt": ..., "completion": ...}, two strings, without a template: a document of both, one after the
     other. Tokens are learnt as in trl: the first is the one in which the document first differs from the
     prompt alone; the last is the token that ends the document.
   - {"prompt": ..., "chosen": ..., "rejected": ...}: a pair of answers (tt_lm_preference_model), of which the
     first is preferred, in the forms that trl reads: three strings, where the token that ends a document
     follows each answer; three lists of messages; or two lists without "prompt", whose common first messages
     are the prompt. A pair becomes two documents: one of the chosen, one of the rejected answer. Both answers
     begin at the first token at which one document differs from the prompt alone. Either all lines or none
     are pairs.
   "content" is a text or a list, and may be missing beside "tool_calls". The template also reads "tools": a
   list of objects, or a text with such a list as JSON. Members with other names are ignored. Errors name
   the line. */
tt_token_stream *tt_token_stream_read(tt_context *ctx, const char *path, const tt_stream_options *o);
/* Opens a file of ids, `width` bytes each (2 or 4, little-endian), as nanoGPT writes files, or with llm.c's
   header of 1024 bytes (GPT-2: ids of 2 bytes, LLaMA 3: ids of 4). With width 0 the header says the width;
   without a header the width is 4 if vocab is above 65536 or if the upper halves of the first ids would be 0,
   else 2, and a file whose ids look like 8 bytes is refused. Ids are 0 to vocab - 1; `end` ends a document
   (-1: none). */
tt_token_stream *tt_token_stream_open(tt_context *ctx, const char *path, int width, int vocab, int end);
/* Writes the ids to a file without a header, 2 bytes an id if vocab is at most 65536, else 4. Refuses
   conversations: such a file does not say which tokens are learnt. */
tt_status tt_token_stream_write(const tt_token_stream *s, const char *path);
/* Moves the last n tokens out of s into a new stream, for example for validation. If s has conversations or
   pairs, the function moves whole ones: the last ones, with at most n tokens together. */
tt_token_stream *tt_token_stream_split(tt_token_stream *s, int64_t n);
void tt_token_stream_free(tt_token_stream *s);
int64_t tt_token_stream_count(const tt_token_stream *s);
bool tt_token_stream_pairs(const tt_token_stream *s); /* whether the stream has pairs of answers */
int tt_token_stream_vocab(const tt_token_stream *s);
/* Copies n ids from number `first` on. Returns TT_ERR_FORMAT if an id is not below vocab. */
tt_status tt_token_stream_get(const tt_token_stream *s, int64_t first, int64_t n, int32_t *to);
/* Returns the bytes of text that the tokens stand for, without the tokens before and after documents; 0 if
   the stream is a file of ids or has conversations, -1 after an error. A mean `loss`, in nats per token, is
   `loss / log(2) * count / bytes` in bits per byte. */
int64_t tt_token_stream_bytes(const tt_token_stream *s);

typedef struct tt_token_loader_options {
    int batch;         /* Set it larger for smoother gradients: the windows of a step; default 16 */
    int accumulate;    /* Set it above 1 if a step needs too much memory: the micro-batches of a step, as in
                          tt_loader_options; default 1 */
    int length;        /* Set it to as many tokens as the model should see at once: the tokens of a window;
                          default 256 */
    bool shuffle;      /* Clear it for evaluation, which reads windows in order, not shuffled by (seed,
                          epoch); default true */
    bool across;       /* Set it to train as nanoGPT and llm.c do: a token sees the documents before it in its
                          window, and the end of one document predicts the next; default false: attention and
                          positions start anew with each document */
    bool whole;        /* Set it if documents should neither be divided nor share a window: a window is a
                          document, cut to `length` tokens; conversations without a token to learn in their
                          window are left out; default false: windows are filled with documents, and end where
                          they are full */
    tt_parallel parallel; /* Set it if the trainer has several ranks, as in tt_loader_options; default: one
                             group on one rank */
} tt_token_loader_options;
tt_token_loader_options tt_token_loader_options_default(void);
/* Makes batches of a stream's windows, one after another without padding; the last window may be shorter. In
   an epoch each token is a target once, except the first token of the stream. With the option `whole`, the
   first token of each document, and tokens that are cut, are no targets. A batch has the array "targets"
   (rows): the token that follows each row's token. The target is -100 if no token follows, or if the token
   that follows is not learnt. The stream must outlive the loader. tt_token_loader_new reads the whole stream
   once, so that an id that is not below vocab is found before training. NULL options: defaults. Returns NULL
   on error.
   If the stream has pairs of answers, `batch` counts pairs. A window is a pair: two sequences, each cut to
   its first `length` tokens, as in trl. Pairs that have no token of an answer in one of their sequences are
   left out, and the logger gets their number. Batches have an index, the number of the pair for each of its
   two sequences, and these arrays: "answers", i32 (n, 1), for each token of an answer the row of the token
   before it, and the arrays of tt_preference_loss, with as many rows. */
typedef struct tt_token_loader tt_token_loader;
tt_token_loader *tt_token_loader_new(tt_context *ctx, const tt_token_stream *s,
                                     const tt_token_loader_options *o);
void tt_token_loader_free(tt_token_loader *l);
const tt_source *tt_token_loader_source(tt_token_loader *l); /* valid as long as the loader */
