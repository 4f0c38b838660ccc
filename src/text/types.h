#pragma once
#include "../base/base.h"
#include "code_points.h"
#include "../files/lists.h"

/* ===========================================================================================================
   TEXT                                                                                              src/text/
   Tokenizers. A text is normalized and split into words, a model turns each word into tokens, and the
   post-processor puts ids around the result. Uses base and files.
   ======================================================================================================== */

/* --------------------------------------------------------------------------------------- tokenizer: parts */

/* These tokenizers do what the Rust package `tokenizers` does; tests/golden/compare_tokens.py and
   compare_bpe.py compare the two. Steps: cut the text at added tokens that it spells out; normalize the rest;
   cut that at the added tokens that it then spells out; cut it into words with splitters; turn each word into
   tokens with a model (WordPiece, byte-pair encoding or Unigram); put the post-processor's ids around all. */
#define TT__IDS_LIMIT (1 << 22)     /* larger ids are refused: memory is allocated by id */
#define TT__ADDED_BYTES 4096        /* longer added tokens are refused: each byte is a candidate */

#define TT__VOCAB_BYTES ((size_t)1 << 28) /* larger vocab.txt files are refused; offsets have 32 bits */
#define TT__NO_TOKEN UINT32_MAX

enum {
    TT__STEP_LIMIT = 16, /* max normalizers, splitters or decoders in a row */
    TT__AROUND = 16,     /* max ids before a text, and after a text */
    TT__FEW = 4096       /* bytes of a short text, which needs no heap memory */
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

/* Regular expressions in the style of GPT-2:
   contractions | prefix? letters+ | digits | ' '? others+ | line ends | white space but its last character |
   white space */
typedef struct tt__pattern {
    bool any_case;   /* case of contractions ('s 't 're 've 'm 'll 'd) is ignored */
    bool any_prefix; /* prefix of letters: any character but line ends and digits; else a space */
    bool line_ends;  /* others take the line ends after them; white space ends at its last line end */
    int digits;      /* max digits in a match; 0: any number, with a space before them */
} tt__pattern;

typedef struct tt__step {
    tt__step_kind kind;
    tt__pattern pattern;
    bool each;                     /* DIGITS, PUNCTUATION: each character is a word; else each run is.
                                      WORDPIECE: cleanup removes spaces before some punctuation and
                                      contractions */
    bool splits;                   /* BYTES: with GPT-2's pattern; METASPACE: before each replacement */
    bool prefix_space;             /* BYTES */
    bool prefix_always, prefix_first; /* METASPACE */
    bool left, right;              /* TRIM: ends at which white space is removed */
    const char *from, *to;         /* REPLACE, PREPEND (to), METASPACE (to), STRIP (from), SPACES (to:
                                      replaces two or more spaces); PRECOMPILED: units, and texts that end
                                      with a NUL */
    size_t from_bytes, to_bytes;
    int64_t start, stop;           /* STRIP: max characters */
} tt__step;

typedef struct tt__step_list { tt__step all[TT__STEP_LIMIT]; int n; } tt__step_list;

typedef struct tt__slice { uint32_t start, bytes; } tt__slice; /* bytes TT__NO_TOKEN: none */
/* head: the first 8 bytes of a text, padded with zeros; bytes: its length; id -1: free slot. */
typedef struct tt__bucket { uint64_t head; uint32_t bytes; int32_t id; } tt__bucket;

/* Hash table from texts to ids: open addressing, at most half full. */
typedef struct tt__ids_by_text {
    /* Base of the texts. Their first `skipped` bytes are left out. */
    const char *base;
    uint32_t skipped;
    const tt__slice *slices; /* by id */
    tt__bucket *slots;
    uint32_t mask;
    uint32_t longest;        /* max bytes of a text */
} tt__ids_by_text;

/* Tree of the bytes of tokens. Node 0 is the root. Edges are in a hash table with open addressing, at most
   half full. An edge is its parent (28 bits), byte (8) and child (28); UINT64_MAX: free. */
typedef struct tt__prefixes {
    uint64_t *edges;
    size_t slots;
    int shift;         /* from a hash to a slot */
    int32_t *ids;      /* (count) the token that ends at a node; -1: none */
    int count, capacity;
} tt__prefixes;

typedef struct tt__added_tree {
    tt__prefixes prefixes; /* its ids are places in `added` */
    bool begins[256];      /* does a token begin with the byte? */
    int first;             /* the byte that all tokens begin with; -1: they differ */
} tt__added_tree;

typedef struct tt__added {
    const char *text;  /* text to search for and to decode; normalized if `normalized` */
    size_t bytes;
    int32_t id;
    bool single_word, lstrip, rstrip, normalized, special;
    bool skipped;      /* special, with the text of the file: left out of decoded texts */
} tt__added;

/* A merge of byte-pair encoding. pair UINT64_MAX: free slot. */
typedef struct tt__bpe_rule { uint64_t pair; uint32_t rank; int32_t id; } tt__bpe_rule;

typedef struct tt__kept_file { const char *name; tt__file_bytes file; } tt__kept_file;

typedef struct tt__vocab {
    char *texts, *words;          /* of all tokens; the words that they stand for (may be the same) */
    tt__slice *text, *word;       /* (size) */
    size_t used;                  /* bytes of `texts` in use */
    int own;                      /* the vocabulary's max id plus 1; ids from there on are added tokens */
    tt__ids_by_text by_text, by_word, by_added;
} tt__vocab;

typedef enum tt__model_kind { TT__MODEL_BPE, TT__MODEL_UNIGRAM, TT__MODEL_WORDPIECE } tt__model_kind;

typedef struct tt__model {
    tt__model_kind kind;
    int unk;                      /* unknown token; -1: text without a token is left out */
    bool byte_fallback;           /* byte-pair encoding, Unigram */
    int32_t fallback[256];        /* tokens "<0x00>" to "<0xFF>"; -1: none */
    int64_t word_chars;           /* WordPiece: longer words are unknown */
    const char *piece;            /* WordPiece: prefix of tokens that continue a word */
    tt__ids_by_text rest;         /* WordPiece: those tokens, by their text without the prefix */
    tt__prefixes prefixes;        /* Unigram */
    double *scores;               /* (vocab.own) Unigram */
    double unk_score;
    bool fuse_unk, ignore_merges; /* byte-pair encoding, as all fields below */
    int32_t bytes[256];           /* BYTES: the token of a byte; -1: none */
    uint8_t *whole;               /* (size) do merges make the token of its text? 0: unknown, 1: yes, 2: no */
    tt__bpe_rule *merges;
    int merge_shift;
    uint64_t merge_mask;
    bool cuts;                    /* no merge crosses the start of a run of U+2581: words end there */
} tt__model;

typedef struct tt__around { int32_t ids[TT__AROUND]; int n; } tt__around;

typedef struct tt__finisher {
    tt__around before, behind;     /* ids before and after those of a text */
    int32_t roles[TT_TOKEN_COUNT]; /* by tt_special_token; -1: none */
    tt__step_list decode;
    bool decodes;                  /* has a decoder; otherwise spaces join tokens */
} tt__finisher;

struct tt_tokenizer {
    tt_context *ctx;
    tt__unicode *unicode;
    tt__chunk *chunks;            /* texts of steps and added tokens */
    tt__step_list normalize, split;
    bool maps_ascii;              /* normalizers map ASCII only by `ascii`; a value above 0x7F: dropped */
    uint8_t ascii[128];
    int mapped_at;                /* splitters after this one see bytes as characters; split.n: none do */
    tt__vocab vocab;
    tt__model model;
    tt__finisher finish;
    int size;                     /* max id plus 1 */
    tt__added *added;
    int n_added, cap_added;
    int32_t *added_of;            /* (size) place of an id in `added`; -1: not added */
    tt__added_tree trees[2];      /* added tokens to find before and after normalization */
    bool lowercase;               /* of a vocab.txt, which is not kept */
    tt__kept_file kept[6];        /* files that tt_tokenizer_save writes */
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
