#pragma once
#include "../base/base.h"
#include "code_points.h"
#include "../files/lists.h"

/* ===========================================================================================================
   TEXT                                                                                              src/text/
   Tokenizers and chat templates. A text is normalized and split into words, a model turns each word into
   tokens, and the post-processor puts ids around the result. A chat template writes a conversation as one
   text. Uses base and files.
   ======================================================================================================== */

/* --------------------------------------------------------------------------------------- tokenizer: parts */

/* The tokenizers give the same ids as the Rust package `tokenizers`; tests/golden/compare_tokens.py and
   compare_bpe.py compare the two. Steps: find added tokens in the text; normalize the parts between the
   tokens; find added tokens in the normalized parts; cut the remaining text into words with splitters; turn
   each word into tokens with a model (WordPiece, byte-pair encoding or Unigram); put the post-processor's ids
   before and after. */
#define TT__IDS_LIMIT (1 << 22)     /* ids from here on are refused: tables have an entry for each id */
#define TT__ADDED_BYTES 4096        /* longer added tokens are refused, because the search may read a whole
                                       token at each place */

#define TT__VOCAB_BYTES ((size_t)1 << 28) /* larger vocab.txt files are refused: offsets have 32 bits */
#define TT__NO_TOKEN UINT32_MAX

enum {
    TT__STEP_LIMIT = 16, /* max number of normalizers, of splitters and of decoders of a tokenizer */
    TT__AROUND = 16,     /* max number of ids that are put before a text, and after a text */
    TT__FEW = 4096       /* max bytes of a short text, which needs no heap memory */
};

typedef enum tt__step_kind {
    /* Normalizers; CLEAN, CJK and NONSPACING are BERT's. */
    TT__STEP_NFC, TT__STEP_NFD, TT__STEP_NFKD, TT__STEP_ACCENTS, TT__STEP_LOWER, TT__STEP_CLEAN,
    TT__STEP_CJK, TT__STEP_NONSPACING,
    TT__STEP_PREPEND, TT__STEP_REPLACE, TT__STEP_SPACES, TT__STEP_TRIM, TT__STEP_PRECOMPILED,
    /* Splitters. */
    TT__STEP_REGEX, TT__STEP_TRIPLES, TT__STEP_DIGITS, TT__STEP_PUNCTUATION, TT__STEP_WHITE,
    TT__STEP_METASPACE, TT__STEP_BERT, TT__STEP_BYTES,
    /* Decoders. */
    TT__STEP_BYTE_FALLBACK, TT__STEP_FUSE, TT__STEP_STRIP, TT__STEP_WORDPIECE
} tt__step_kind;

/* Options of a regular expression in the style of GPT-2's, whose alternatives are
   contractions | prefix? letters+ | digits | ' '? others+ | line ends | white space but its last character |
   white space */
typedef struct tt__pattern {
    bool any_case;   /* contractions ('s 't 're 've 'm 'll 'd) may have capitals */
    bool any_prefix; /* the prefix of letters is any character except line ends, letters and digits; else a
                        space */
    bool line_ends;  /* a run of other characters includes the line ends that follow; a run of white space
                        with a line end stops after its last line end */
    int digits;      /* max number of digits in a match; 0: any number, with an optional space before */
} tt__pattern;

typedef struct tt__text_step {
    tt__step_kind kind;
    tt__pattern pattern;
    /* Each comment below names in capitals the kinds of steps that read the field. */
    bool each;                     /* DIGITS, PUNCTUATION: each character is a word; else each run is a word.
                                      WORDPIECE: cleanup removes spaces before some punctuation and
                                      contractions */
    bool splits;                   /* BYTES: splits with GPT-2's pattern. METASPACE: splits before each mark,
                                      the character that stands for a space */
    bool prefix_space;             /* BYTES: puts a space before the text */
    bool prefix_always, prefix_first; /* METASPACE: puts the mark for a space before each part of the text
                                         (prefix_always) or only before the first part (prefix_first) */
    bool left, right;              /* TRIM: removes white space at the text's start (left), end (right) */
    const char *from, *to;         /* REPLACE: replaces `from` by `to`. SPACES: replaces each run of two or
                                      more spaces by `to`. PREPEND: puts `to` before the text. STRIP: removes
                                      the character `from`. PRECOMPILED: `from` has the trie's units, `to` the
                                      replacing texts, each ended by a NUL */
    size_t from_bytes, to_bytes;
    int64_t start, stop;           /* STRIP: max number of characters to remove at the start of the text
                                      (start) and at its end (stop) */
} tt__text_step;

typedef struct tt__step_list { tt__text_step all[TT__STEP_LIMIT]; int n; } tt__step_list;

typedef struct tt__text_slice { uint32_t start, bytes; } tt__text_slice; /* place of a text in a buffer; if
                                                                            `bytes` is TT__NO_TOKEN, there is
                                                                            no text */
/* A slot of a hash table of texts. head: the first 8 bytes of a text, padded with zeros; bytes: the text's
   length; id: -1 in a free slot. */
typedef struct tt__bucket { uint64_t head; uint32_t bytes; int32_t id; } tt__bucket;

/* Hash table from texts to ids: open addressing, at most half full. */
typedef struct tt__ids_by_text {
    /* The table leaves out the first `skipped` bytes of each text. base: address of the texts plus `skipped`.
       A slice has the place of a whole text: `base` plus the slice's start is the address of the bytes that
       are not left out. */
    const char *base;
    uint32_t skipped;
    const tt__text_slice *slices; /* the slice of each id */
    tt__bucket *slots;
    uint32_t mask;
    uint32_t longest;        /* max bytes of a text */
} tt__ids_by_text;

/* Prefix tree of the bytes of tokens. Node 0 is the root. Edges are in a hash table with open addressing, at
   most half full. An edge is a 64-bit number: parent node (28 bits), byte (8 bits), child node (28 bits);
   UINT64_MAX: a free slot. */
typedef struct tt__prefixes {
    uint64_t *edges;
    size_t slots;
    int shift;         /* slot = hash >> shift */
    int32_t *ids;      /* for each of `count` nodes: the token that ends there; -1: none */
    int count, capacity;
} tt__prefixes;

typedef struct tt__added_tree {
    tt__prefixes prefixes; /* the tree's `ids` are indices into tt_tokenizer.added */
    bool begins[256];      /* for each byte: whether a token begins with the byte */
    int first;             /* the first byte of every token; -1: the first bytes differ */
} tt__added_tree;

typedef struct tt__added {
    const char *text;  /* text to search for, which decoding returns; in normalized form if `normalized` */
    size_t bytes;
    int32_t id;
    bool single_word, lstrip, rstrip, normalized, special;
    bool skipped;      /* decoding with skip_special leaves the token out: the token is special, and
                          normalization kept its text */
} tt__added;

/* A merge of byte-pair encoding, in a hash table. pair: the two symbols to merge; UINT64_MAX: a free slot. */
typedef struct tt__bpe_rule { uint64_t pair; uint32_t rank; int32_t id; } tt__bpe_rule;

typedef struct tt__kept_file { const char *name; tt__file_bytes file; } tt__kept_file;

typedef struct tt__vocab {
    char *texts, *words;          /* texts: texts of all tokens; words: the words that tokens stand for (may
                                     be `texts`) */
    tt__text_slice *text, *word;       /* text: for each id, its slice of `texts`; word: for each id, its
                                          slice of `words` */
    size_t used;                  /* bytes of `texts` in use */
    int own;                      /* the vocabulary's max id plus 1; larger ids are added tokens */
    tt__ids_by_text by_text, by_word, by_added;
} tt__vocab;

typedef enum tt__model_kind { TT__MODEL_BPE, TT__MODEL_UNIGRAM, TT__MODEL_WORDPIECE } tt__model_kind;

typedef struct tt__token_model {
    tt__model_kind kind;
    int unk;                      /* id of the unknown token; -1: text without a token is left out */
    bool byte_fallback;           /* byte-pair encoding, Unigram: an unknown character becomes the tokens
                                     `fallback` of its bytes */
    int32_t fallback[256];        /* ids of tokens "<0x00>" to "<0xFF>"; -1: no token */
    int64_t word_chars;           /* WordPiece: max characters of a word; longer words are unknown */
    const char *piece;            /* WordPiece: prefix of tokens that continue a word */
    tt__ids_by_text rest;         /* WordPiece: tokens that continue a word, by text without the prefix */
    tt__prefixes prefixes;        /* Unigram: all tokens */
    double *scores;               /* Unigram: score of each of vocab.own tokens */
    double unk_score;             /* Unigram: score of the unknown token */
    /* All fields below are for byte-pair encoding. */
    bool fuse_unk, ignore_merges; /* options "fuse_unk" and "ignore_merges" of the file */
    int32_t bytes[256];           /* for splitter BYTES: the token of each byte; -1: none */
    uint8_t *whole;               /* for each id: whether merging the symbols of its text results in the id.
                                     0: unknown, 1: yes, 2: no */
    tt__bpe_rule *merges;
    int merge_shift;
    uint64_t merge_mask;
    bool cuts;                    /* no merge crosses the start of a run of U+2581, so words are cut there */
} tt__token_model;

typedef struct tt__around { int32_t ids[TT__AROUND], types[TT__AROUND]; int n; } tt__around;

/* The ids that the post-processor puts around one text, or around and between a pair of texts. */
typedef struct tt__template {
    tt__around around[3];          /* ids before the first text, after the first text, and after the second
                                      text of a pair */
    int32_t types[2];              /* the token type of each text's ids */
} tt__template;

typedef struct tt__finisher {
    tt__template one, two;         /* templates of one text and of a pair */
    int templates;                 /* number of post-processors that put ids around texts */
    int trims;                     /* number of post-processors that leave white space out of spans */
    bool trims_prefix[TT__STEP_LIMIT]; /* for each of the `trims` post-processors: a space may be added before
                                          the text */
    bool pairs;                    /* pairs can be encoded: `two` has the first text once, and then the
                                      second text once */
    int32_t roles[TT_TOKEN_COUNT]; /* the id for each tt_special_token; -1: none */
    tt__step_list decode;
    bool decodes;                  /* tokenizer.json has a decoder; if not, spaces join tokens */
} tt__finisher;

struct tt_tokenizer {
    tt_context *ctx;
    tt__unicode *unicode;
    tt__chunk *chunks;            /* texts of steps and added tokens */
    tt__step_list normalize, split;
    bool maps_ascii;              /* the normalizers change an ASCII text only as `ascii` says */
    uint8_t ascii[128];           /* for each ASCII character: its normalized form; above 0x7F: dropped */
    int mapped_at;                /* number of the ByteLevel splitter, after which splitters see bytes as
                                     characters; split.n if there is no ByteLevel splitter */
    tt__vocab vocab;
    tt__token_model model;
    tt__finisher finish;
    int size;                     /* max id plus 1 */
    tt__added *added;
    int n_added, cap_added;
    int32_t *added_of;            /* for each id: its index in `added`; -1: not an added token */
    tt__added_tree trees[2];      /* added tokens to find before ([0]) and after ([1]) normalization */
    bool lowercase;               /* option of a tokenizer that was loaded from a vocab.txt; `kept` lacks that
                                     file */
    tt__kept_file kept[6];        /* the loaded files, which tt_tokenizer_save writes unchanged */
    int n_kept;
};

void tt_tokenizer_free(tt_tokenizer *k)
{
    if (!k) return;
    tt__chunks_free(k->ctx, &k->chunks);
    for (int i = 0; i < k->n_kept; i++) tt__file_close(k->ctx, &k->kept[i].file);
    if (k->vocab.words != k->vocab.texts) tt__free(k->ctx, k->vocab.words);
    if (k->vocab.word != k->vocab.text) tt__free(k->ctx, k->vocab.word);
    if (k->vocab.by_word.slots != k->vocab.by_text.slots) tt__free(k->ctx, k->vocab.by_word.slots);
    void *const owned[] = {k->unicode, k->vocab.texts, k->vocab.text, k->vocab.by_text.slots,
                           k->vocab.by_added.slots, k->model.whole, k->model.merges, k->model.rest.slots,
                           k->model.prefixes.edges, k->model.prefixes.ids, k->model.scores, k->added,
                           k->added_of, k->trees[0].prefixes.edges, k->trees[0].prefixes.ids,
                           k->trees[1].prefixes.edges, k->trees[1].prefixes.ids, k};
    tt__free_all(k->ctx, owned, TT__COUNT(owned));
}
