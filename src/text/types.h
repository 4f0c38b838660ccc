#pragma once
#include "../base/base.h"
#include "code_points.h"
#include "../files/lists.h"

/* ===========================================================================================================
   TEXT                                                                                              src/text/
   Tokenizers: a text is normalized and split, a model makes tokens of each word, and the post-processor puts
   ids around all. Uses base and files.
   ======================================================================================================== */

/* --------------------------------------------------------------------------------------- tokenizer: parts */

/* As the Rust package `tokenizers` does it; tests/golden/compare_tokens.py and compare_bpe.py compare the
   two. A text is cut at the added tokens that are spelled out in it; the rest is normalized, cut at the added
   tokens that are spelled out then, and cut into words by splitters; a model makes tokens of each word:
   WordPiece, byte-pair encoding or Unigram; the post-processor's ids go around all. */
#define TT__IDS_LIMIT (1 << 22)     /* a larger id is refused: memory is by id */
#define TT__ADDED_BYTES 4096        /* a longer added token is refused: it is looked for at every byte */

#define TT__VOCAB_BYTES ((size_t)1 << 28) /* a larger vocab.txt is refused; offsets into it have 32 bits */
#define TT__NO_TOKEN UINT32_MAX

enum {
    TT__STEP_LIMIT = 16, /* normalizers, splitters or decoders in a row */
    TT__AROUND = 16,     /* ids that stand before or behind those of a text, at most */
    TT__FEW = 4096       /* bytes of a text that needs no memory from the heap */
};

typedef enum tt__step_kind {
    TT__STEP_NFC, TT__STEP_NFD, TT__STEP_NFKD, TT__STEP_ACCENTS, TT__STEP_LOWER, TT__STEP_CLEAN,
    TT__STEP_CJK, TT__STEP_NONSPACING,                            /* normalizers, of BERT the last three */
    TT__STEP_PREPEND, TT__STEP_REPLACE, TT__STEP_SPACES, TT__STEP_TRIM, TT__STEP_PRECOMPILED,  /* too */
    TT__STEP_REGEX, TT__STEP_TRIPLES, TT__STEP_DIGITS, TT__STEP_PUNCTUATION, TT__STEP_WHITE,
    TT__STEP_METASPACE, TT__STEP_BERT, TT__STEP_BYTES,                                   /* splitters */
    TT__STEP_BYTE_FALLBACK, TT__STEP_FUSE, TT__STEP_STRIP, TT__STEP_WORDPIECE           /* decoders */
} tt__step_kind;

/* The regular expressions that GPT-2 began:
   contractions | prefix? letters+ | digits | ' '? others+ | line ends | white space but its last |
   white space */
typedef struct tt__pattern {
    bool any_case;   /* of contractions: 's 't 're 've 'm 'll 'd */
    bool any_prefix; /* what may stand before letters: anything but a line end or a digit; else a space */
    bool line_ends;  /* others take line ends behind them; white space ends at its last line end */
    int digits;      /* at most so many together; 0: any number, and a space before them */
} tt__pattern;

typedef struct tt__step {
    tt__step_kind kind;
    tt__pattern pattern;
    bool each;                     /* DIGITS, PUNCTUATION: each is a word; else each run. WORDPIECE: spaces
                                      before some punctuation and contractions are left out */
    bool splits;                   /* BYTES: by GPT-2's pattern; METASPACE: before each replacement */
    bool prefix_space;             /* BYTES */
    bool prefix_always, prefix_first; /* METASPACE */
    bool left, right;              /* TRIM: the ends that lose their white space */
    const char *from, *to;         /* REPLACE, PREPEND (to), METASPACE (to), STRIP (from), SPACES (to: what
                                      stands for two or more); PRECOMPILED: units, and texts that end with a
                                      NUL */
    size_t from_bytes, to_bytes;
    int64_t start, stop;           /* STRIP: characters at most */
} tt__step;

typedef struct tt__step_list { tt__step all[TT__STEP_LIMIT]; int n; } tt__step_list;

typedef struct tt__slice { uint32_t start, bytes; } tt__slice; /* bytes TT__NO_TOKEN: there is none */
/* The first 8 bytes of a text, with zeros behind a shorter one, and how many it has; id -1: free. */
typedef struct tt__bucket { uint64_t head; uint32_t bytes; int32_t id; } tt__bucket;

/* Texts to ids: open addressing, at most half full. */
typedef struct tt__ids_by_text {
    const char *base;        /* of the texts, whose first bytes may be left out: so many */
    uint32_t skipped;
    const tt__slice *slices; /* by id */
    tt__bucket *slots;
    uint32_t mask;
    uint32_t longest;        /* bytes of a text */
} tt__ids_by_text;

/* A tree of the bytes of tokens: node 0 is its root. An edge is in a hash table with open addressing, at
   most half full: its parent (28 bits), byte (8) and child (28); UINT64_MAX: none. */
typedef struct tt__prefixes {
    uint64_t *edges;
    size_t slots;
    int shift;         /* of a hash, to a slot */
    int32_t *ids;      /* (count) the token that ends at a node; -1: none */
    int count, capacity;
} tt__prefixes;

typedef struct tt__added_tree {
    tt__prefixes prefixes; /* for ids the places among the added tokens */
    bool begins[256];      /* does one begin with that byte? */
    int first;             /* the byte that all begin with; -1: they begin with several */
} tt__added_tree;

typedef struct tt__added {
    const char *text;  /* as it is looked for and decoded: normalized, where that is asked for */
    size_t bytes;
    int32_t id;
    bool single_word, lstrip, rstrip, normalized, special;
    bool skipped;      /* special, and its text is as the file has it: left out of what is decoded */
} tt__added;

/* Pair UINT64_MAX: free. */
typedef struct tt__bpe_rule { uint64_t pair; uint32_t rank; int32_t id; } tt__bpe_rule;

typedef struct tt__kept_file { const char *name; tt__file_bytes file; } tt__kept_file;

typedef struct tt__vocab {
    char *texts, *words;          /* of all tokens; what they stand for in a text, which may be the same */
    tt__slice *text, *word;       /* (size) */
    size_t used;                  /* bytes of `texts` so far */
    int own;                      /* ids below this may be the vocabulary's; others are added */
    tt__ids_by_text by_text, by_word, by_added;
} tt__vocab;

typedef enum tt__model_kind { TT__MODEL_BPE, TT__MODEL_UNIGRAM, TT__MODEL_WORDPIECE } tt__model_kind;

typedef struct tt__model {
    tt__model_kind kind;
    int unk;                      /* -1: what has no token is left out */
    bool byte_fallback;           /* of byte-pair encoding and Unigram */
    int32_t fallback[256];        /* "<0x0A>" and the like; -1: none */
    int64_t word_chars;           /* WordPiece: a word of more is unknown */
    const char *piece;            /* what the tokens that continue a word begin with */
    tt__ids_by_text rest;         /* those tokens, without that */
    tt__prefixes prefixes;        /* of Unigram, as the scores */
    double *scores;               /* (vocab.own) */
    double unk_score;
    bool fuse_unk, ignore_merges; /* of byte-pair encoding, as all that follows */
    int32_t bytes[256];           /* BYTES: the token of a byte; -1: none */
    uint8_t *whole;               /* (size) does its text become this token? 0: not known, 1: yes, 2: no */
    tt__bpe_rule *merges;
    int merge_shift;
    uint64_t merge_mask;
    bool cuts;                    /* no merge is across the start of a run of U+2581: words end there */
} tt__model;

typedef struct tt__around { int32_t ids[TT__AROUND]; int n; } tt__around;

typedef struct tt__finisher {
    tt__around before, behind;     /* ids around those of a text */
    int32_t roles[TT_TOKEN_COUNT]; /* by tt_special_token; -1: none */
    tt__step_list decode;
    bool decodes;                  /* there is a decoder; else tokens are joined by spaces */
} tt__finisher;

struct tt_tokenizer {
    tt_context *ctx;
    tt__unicode *unicode;
    tt__chunk *chunks;            /* the texts of steps and added tokens */
    tt__step_list normalize, split;
    bool maps_ascii;              /* `ascii` is all that normalizers do to ASCII; above 0x7F: they drop it */
    uint8_t ascii[128];
    int mapped_at;                /* splitters from here on see bytes as characters; split.n: none */
    tt__vocab vocab;
    tt__model model;
    tt__finisher finish;
    int size;                     /* the largest id, and 1 */
    tt__added *added;
    int n_added, cap_added;
    int32_t *added_of;            /* (size) which of these an id is; -1: none */
    tt__added_tree trees[2];      /* those looked for before and after normalization */
    bool lowercase;               /* of a vocab.txt, of which nothing is kept */
    tt__kept_file kept[6];        /* what tt_tokenizer_save writes */
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
