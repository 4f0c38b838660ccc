#pragma once
#include "standard.h"
#include "context.h"
#include "program.h"
#include "tokenizer.h"

/* ----------------------------------------------------------------------------------------------- datasets */

/* Where the text of a file begins: in front, or behind a byte order mark of UTF-8. TT_ERR_FORMAT: it is not
   UTF-8, or more than an eighth of its first 4096 bytes are control characters, as of UTF-16. The sentence
   names path, line and byte, and tells how to convert UTF-16, UTF-32 or Latin-1. */
tt_status tt_text_begin(tt_context *ctx, const char *path, const char *text, size_t bytes, size_t *begin);

/* Labelled texts in memory, or labelled images. */
typedef struct tt_dataset tt_dataset;

/* A text, which may hold NULs, and the number of its class. */
typedef struct tt_text { const char *text; size_t bytes; int label; } tt_text;

/* Texts of the caller: at least one, of which the labels are 0 to classes - 1. class_names: (classes) UTF-8.
   All is copied. examples/datasets.h reads IMDb's reviews with it. */
tt_dataset *tt_dataset_texts(tt_context *ctx, const tt_text *texts, int64_t count,
                             const char *const *class_names, int classes);

/* The names of a table's columns, and how fields are divided. */
typedef struct tt_table_options {
    const char *text_column, *label_column; /* default "text" and "label" */
    const char *split_column;               /* default "split"; a file need not have it */
    char delimiter;                         /* default 0: a comma where the file is a .csv, else a tab */
    bool unquoted;                          /* double quotes are characters like others. Default false */
} tt_table_options;
tt_table_options tt_table_options_default(void);

/* A table in a text file, such as CSV or TSV: a header that names the columns, in any order, among others;
   UTF-8 (see tt_text_begin), RFC 4180 quoting, empty lines passed over. Lines end by LF or CR LF, or in a
   file without any LF by CR. Errors name the line.
   split: keep the rows whose split column says so; NULL keeps all. "validation", "valid", "val" and "dev"
   mean the same. Where split is one of these, "train" or "test", a row that says something else is an error.
   In a file without a split column "test" is a tenth of the rows, of each class its share, chosen by the
   context's seed, and "train" the others. A table without rows for validation or test has 0 of them, which is
   no error: tt_dataset_split takes some of "train".
   classes: labels are numbered in the order of these (n_classes of them); NULL, 0: of the distinct labels of
   the rows kept, in byte order, or by value where all are numbers, as -1, 0, 2.5, 10. Labels must be UTF-8,
   as config.json is. o NULL: defaults. */
tt_dataset *tt_dataset_table(tt_context *ctx, const char *path, const char *split, const char *const *classes,
                             int n_classes, const tt_table_options *o);

/* 8 bits a channel; rows from the top, the channels of a pixel together: (height, width, channels). */
typedef struct tt_image {
    const uint8_t *pixels;
    int height, width; /* 1..65535 */
    int channels;      /* 1: grey, 2: grey and alpha, 3: red, green, blue, 4: these and alpha */
} tt_image;

/* Writes the image, resized, to `to` (height, width, image->channels), which must not overlap it. Bilinear,
   over a neighbourhood that grows with the reduction (antialiasing); equal to Pillow's Image.resize((width,
   height), BILINEAR), and so to torchvision's Resize of such an image: first the width, then the height, with
   weights of 22 bits, rounded to grey levels in between (later versions than 12.1 at times begin with the
   height, and differ by a level; with alpha, they round otherwise). With alpha, colours weigh by it. */
tt_status tt_image_resize(tt_context *ctx, const tt_image *image, int height, int width, uint8_t *to);

/* Images that the caller reads when they are needed. */
typedef struct tt_image_source {
    int64_t count;
    const int *labels;               /* (count) 0..classes - 1; copied */
    const char *const *class_names;  /* (classes) UTF-8; copied */
    int classes;
    /* Decodes image `index`, 0..count - 1, of any size and channels. NULL, or words that say why it cannot. A
       loader's threads call read and release, several at a time. */
    const char *(*read)(void *user, int64_t index, tt_image *image);
    void (*release)(void *user, tt_image *image); /* what read gave, soon after. May be NULL */
    const char *(*name)(void *user, int64_t index); /* for errors, such as a path. NULL: its number */
    void *user;
    int height, width, channels; /* of every image, to refuse options that do not fit; 0: not known before */
} tt_image_source;
/* examples/datasets.h reads CIFAR-10 with it. */
tt_dataset *tt_dataset_images(tt_context *ctx, const tt_image_source *source);

/* Moves n texts or images out of d into a new dataset: of each class its share, by the context's seed. */
tt_dataset *tt_dataset_split(tt_dataset *d, int64_t n);
void tt_dataset_free(tt_dataset *d);
int64_t tt_dataset_count(const tt_dataset *d);
/* Returns a text with a NUL behind it, "" of an image. bytes may be NULL. */
const char *tt_dataset_text(const tt_dataset *d, int64_t i, size_t *bytes);
int tt_dataset_label(const tt_dataset *d, int64_t i);
int tt_dataset_classes(const tt_dataset *d);
const char *tt_dataset_class_name(const tt_dataset *d, int class_index);
/* Sorts names of classes (n) as tt_dataset_table numbers labels: in byte order, or by value where all are
   numbers. */
void tt_sort_class_names(const char **names, int n);
void tt_dataset_counts(const tt_dataset *d, int64_t *counts); /* texts or images of each class: (classes) */

/* Batches of a dataset: shuffled by (seed, epoch), sorted by length within windows of `window` batches
   (longest first), and cut into steps of `batch` sequences, whose order within the window is shuffled again;
   the last step of an epoch may have fewer. A step is one or more micro-batches, filled in that order, each
   of at most max_seqs = ceil(batch / accumulate) sequences (or as many as there are, or max_tokens / 2) and
   max_tokens tokens, without padding. With parallel.groups > 1 the sequences of a step are dealt out instead,
   so that its micro-batches have like numbers of tokens, and each group equally many of them, as far as there
   are sequences: the same micro-batches for any number of ranks. Texts are tokenized once, when the loader is
   made, on the context's threads (some 100 MB of text a second each); their ids are kept (2 bytes each), so
   that the loader knows what its micro-batches need. The dataset and the tokenizer must stay until the loader
   is freed. */
typedef struct tt_loader_options {
    int batch;        /* sequences, or images, of a step. Default 16 */
    int accumulate;   /* 1..batch / groups; micro-batches have at most ceil(batch / (accumulate * groups))
                         sequences. Default 1 */
    int max_length;   /* tokens of a sequence, [CLS] and [SEP] included; longer ones are cut. Default 512 */
    int max_tokens;   /* tokens of a micro-batch, >= max_length. Default 0: any number */
    bool shuffle;     /* Default true. False: in dataset order, unsorted (evaluation, prediction) */
    int window;       /* batches per sorted window. Default 50; 0 or 1: no sorting */
    bool drop_last;   /* leave out a last incomplete step. Default false */
    int threads;      /* that make images ahead of the trainer, 0..64; 0: tt_loader_next does it. Default 1 */
    tt_parallel parallel; /* of the trainer, after tt_check_options; its `groups` and `data` are read.
                             Default: one group on one rank */
} tt_loader_options;
tt_loader_options tt_loader_options_default(void);

/* How pixels are weighed when an image is resized: by the filters of Pillow, which numbers them so. Results
   are those of Pillow 12.1: later versions at times begin with the height, and differ by some levels. */
typedef enum tt_resample { TT_NEAREST, TT_LANCZOS, TT_BILINEAR, TT_BICUBIC } tt_resample;

/* A loader resizes, pads, crops and flips images, in this order. */
typedef struct tt_image_options {
    int height, width;               /* of the result, cropped out. 1..65535 */
    int channels;                    /* of the result, 1..4; an image has as many, or for 3 also 1 (grey, put
                                        into all three) or 4 (alpha is dropped). Default 3 */
    int resize_height, resize_width; /* 1..65535, see tt_image_resize; default 0, 0: not resized */
    int resize_shortest;             /* 1..65535 instead of these: the shorter side becomes so long, and the
                                        other keeps the proportion, rounded down. Default 0 */
    tt_resample resample;            /* default TT_BILINEAR */
    int pad;                         /* zeros on all four sides; 0..65535. Default 0 */
    bool random_crop;                /* each place is as likely; else the centre (half of the rest, rounded
                                        down, at top and left). Default false */
    bool flip;                       /* mirror left and right with probability 1/2. Default false */
} tt_image_options;
tt_image_options tt_image_options_default(int height, int width);
/* Writes what a loader makes of one image to `to` (height, width, channels), without random_crop and flip. */
tt_status tt_image_prepare(tt_context *ctx, const tt_image *image, const tt_image_options *o, uint8_t *to);

/* The data of one input of a model. */
typedef struct tt_array {
    const char *input; /* its name */
    const void *data;  /* (rows, width) in the input's dtype */
    int64_t rows;
} tt_array;

/* A micro-batch. A trainer sets each input of its model to the array that has its name: one of `arrays`, or
   else the field of that name; "first" is where each sequence starts. What no input reads may be missing.
   Pointers are valid until the next call on whatever gave them. */
typedef struct tt_batch {
    int seqs;                 /* sequences, images or examples; a speed counts `rows`, or else these */
    int rows;                 /* tokens of all sequences together; 0: there are none, as with images */
    const int32_t *ids;       /* (rows) */
    const int32_t *positions; /* (rows) 0, 1, ... within each sequence */
    const int32_t *types;     /* (rows) 0 */
    const int32_t *seq_start; /* (seqs + 1) */
    const int32_t *labels;    /* (seqs) */
    const int64_t *index;     /* (seqs) which of the dataset */
    const uint8_t *pixels;    /* (seqs, image_bytes) */
    int64_t image_bytes;      /* height * width * channels */
    const tt_array *arrays;   /* (n_arrays): for models of your own */
    int n_arrays;
    bool last_of_step;        /* the next micro-batch belongs to another step */
} tt_batch;

/* Where a trainer gets its batches: a loader, or functions of your own. Steps of an epoch are numbered from
   0, and what a step has depends on its epoch and number alone: then a run that is resumed sees the same. */
typedef struct tt_source {
    void *self;                /* for the functions */
    /* Goes to the first micro-batch of a step, 0 to `steps`. */
    tt_status (*seek)(void *self, int64_t epoch, int64_t step);
    /* Fills in the next micro-batch, which is all 0, or sets *more to false at the end of the epoch. An error
       ends tt_fit and tt_evaluate, which return it. */
    tt_status (*next)(void *self, tt_batch *batch, bool *more);
    /* Of an epoch, at least 1. Where `next` gives more, tt_fit and tt_evaluate fail; where it gives fewer,
       tt_fit warns the logger once. A step to train on ends with a micro-batch that is last_of_step. */
    int64_t steps;
    /* The most that a micro-batch has (0: unknown); may a step have more of them than the trainer has data
       ranks? tt_train_options makes room. */
    int max_seqs, max_tokens;
    bool accumulates;
    /* A hash of all that is trained on, to tell other data when a run is resumed. NULL: none is told. */
    uint64_t (*hash)(void *self);
    const char *const *class_names; /* (classes) what labels mean: a run is not resumed with other names */
    int classes;                    /* 0: there are none */
    /* Of several processes, before `seek`: micro-batches are dealt out to `data` ranks in turn, from the
       first of each step on (by_step), or from the first of the epoch; this process has ranks [first, end).
       The data of others may be NULL then, with the right numbers of rows. NULL: all have theirs. */
    void (*deal)(void *self, int data, int first, int end, bool by_step);
    /* Of several processes: writes lines, each ended by a newline, about all that its batches depend on
       beside `hash` and the numbers above; at most `capacity` bytes with the final 0. tt_fit and tt_evaluate
       refuse a process whose lines differ from the first one's, and name the line. NULL: there are none. */
    void (*describe)(void *self, char *to, size_t capacity);
} tt_source;

typedef struct tt_loader tt_loader;
/* At step 0 of epoch 0. NULL options: defaults. NULL on error. */
tt_loader *tt_loader_new(tt_context *ctx, const tt_dataset *d, const tt_tokenizer *k,
                         const tt_loader_options *o);
/* The same of images; max_length, max_tokens and window mean nothing here. Threads of its own read images and
   make of them what `image` says, ahead of the trainer, into a ring of a few micro-batches that is allocated
   here. Crops and flips depend on (seed, epoch, index of the image) alone. An image that cannot be read, or
   does not fit the options, is an error of the micro-batch that it belongs to; those before it are still
   given. tt_loader_seek to where the loader stands keeps what was made ahead. */
tt_loader *tt_image_loader_new(tt_context *ctx, const tt_dataset *d, const tt_image_options *image,
                               const tt_loader_options *o);
void tt_loader_free(tt_loader *l); /* at any time: stops its threads */
int64_t tt_loader_steps(const tt_loader *l); /* steps of an epoch */
/* What a trainer must have room for, by the texts that there are: max_seqs, max_tokens (of the max_seqs
   longest texts; 0 of images) and compile.accumulate (a step may have more micro-batches than
   parallel.data) of tt_train_options. A trainer for several loaders needs the largest. */
int tt_loader_max_seqs(const tt_loader *l);
int tt_loader_max_tokens(const tt_loader *l);
bool tt_loader_accumulates(const tt_loader *l);
int tt_loader_longest(const tt_loader *l); /* tokens of the longest text before it is cut; 0: images */
int64_t tt_loader_cut(const tt_loader *l); /* texts that are cut, as they are longer than max_length */
/* Goes to a step of an epoch (both from 0); order and contents depend on (seed, epoch, step) alone. */
tt_status tt_loader_seek(tt_loader *l, int64_t epoch, int64_t step);
/* Gives the next micro-batch. Returns false at the end of the epoch, where tt_loader_status is TT_OK and one
   seeks on, and on an error, which tt_loader_status returns then. */
bool tt_loader_next(tt_loader *l, tt_batch *batch);
tt_status tt_loader_status(const tt_loader *l); /* of the last tt_loader_next */
double tt_loader_waited(const tt_loader *l); /* seconds that tt_loader_next has waited for images */
/* The loader as a trainer's source, as long as the loader lives; NULL for NULL. */
const tt_source *tt_loader_source(tt_loader *l);

/* ------------------------------------------------------------------------------------------ token streams */

/* What language models train on: documents as tokens one after another, each with a token behind it that ends
   it, and before it what the tokenizer puts in front of a text, as LLaMA's <s>. A document that spells these
   out at its ends has them once, which the logger is warned of. In memory, or in a file that is read where it
   is needed. */
typedef struct tt_token_stream tt_token_stream;
typedef struct tt_stream_options {
    const tt_tokenizer *tokenizer; /* must stay. Default NULL: tokens are bytes, and 256 ends a document */
    int end;                       /* ends a document. Default -1: the tokenizer's TT_TOKEN_EOS */
    int vocab;                     /* the model's: a text with an id that is not below it is refused.
                                      Default 0: as many as the tokenizer has */
    bool bare;                     /* nothing is put in front of a document. Default false */
    const char *separator;         /* a line of a text that parts two documents, as "<|endoftext|>"; "": any
                                      number of empty lines. Default NULL: a text is one document */
} tt_stream_options;
tt_stream_options tt_stream_options_default(void);

/* NULL options: defaults. NULL after an error. With a tokenizer the text must be UTF-8, as that of a file is
   (see tt_text_begin); of a model of bytes it may be any. */
tt_token_stream *tt_token_stream_text(tt_context *ctx, const char *text, size_t bytes,
                                      const tt_stream_options *o);
/* A text file in UTF-8 (see tt_text_begin), or all files of a folder whose names end in .txt, in the order of
   their names. */
tt_token_stream *tt_token_stream_read(tt_context *ctx, const char *path, const tt_stream_options *o);
/* A file of ids, `width` bytes each (2 or 4, little-endian), as nanoGPT writes it; or with llm.c's header of
   1024 bytes (GPT-2's: ids of 2 bytes, LLaMA 3's: of 4). width 0: what the header says, or else 4 for a vocab
   above 65536 and where the upper halves of the first ids would be 0, or else 2; a file whose ids are of 8
   bytes is refused then. Ids are 0 to vocab - 1, `end` ends a document. */
tt_token_stream *tt_token_stream_open(tt_context *ctx, const char *path, int width, int vocab, int end);
/* Writes such a file without a header, of 2 bytes an id if vocab is at most 65536, else of 4. */
tt_status tt_token_stream_write(const tt_token_stream *s, const char *path);
/* Moves the last n tokens out of s into a new stream, as to validate on. */
tt_token_stream *tt_token_stream_split(tt_token_stream *s, int64_t n);
void tt_token_stream_free(tt_token_stream *s);
int64_t tt_token_stream_count(const tt_token_stream *s);
int tt_token_stream_vocab(const tt_token_stream *s);
/* Copies n ids from number `first` on. TT_ERR_FORMAT: one is not below vocab. */
tt_status tt_token_stream_get(const tt_token_stream *s, int64_t first, int64_t n, int32_t *to);
/* Bytes of text that the tokens are, without those before documents and behind them; 0: it has no tokenizer.
   A loss is loss / log(2) * count / bytes bits per byte. -1 after an error. */
int64_t tt_token_stream_bytes(const tt_token_stream *s);

typedef struct tt_token_loader_options {
    int batch;         /* windows of a step. Default 16 */
    int accumulate;    /* as tt_loader_options' */
    int length;        /* tokens of a window. Default 256 */
    bool shuffle;      /* windows, by (seed, epoch). Default true */
    bool across;       /* a token sees the documents before it in its window, and the end of one foretells the
                          next. Default false: attention and positions begin anew with each document */
    tt_parallel parallel; /* as tt_loader_options' */
} tt_token_loader_options;
tt_token_loader_options tt_token_loader_options_default(void);
/* Windows of a stream, one behind the other without padding; the last may be shorter. Each token but the
   first of all is the target of one window in an epoch. A batch has the array "targets" (rows), the token
   that follows each, or -100 for none. s must stay; all of it is read once here, so that an id that is not
   below vocab is found before training. NULL options: defaults. NULL after an error. */
typedef struct tt_token_loader tt_token_loader;
tt_token_loader *tt_token_loader_new(tt_context *ctx, const tt_token_stream *s,
                                     const tt_token_loader_options *o);
void tt_token_loader_free(tt_token_loader *l);
const tt_source *tt_token_loader_source(tt_token_loader *l); /* as long as the loader lives */
