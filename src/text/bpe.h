#pragma once
#include "../base/base.h"
#include "../files/lists.h"
#include "unicode.h"
#include "vocabulary.h"

/* ----------------------------------------------------------------------- byte-pair and Unigram tokenizers */

/* A tokenizer.json with byte-pair encoding (Sennrich et al. 2016) or with Unigram (see tt__unigram_word), as
   the Rust package `tokenizers` does it; tests/golden/compare_bpe.py compares the two. A text is cut at the
   added tokens that are spelled out in it; the rest is normalized, cut at the added tokens that are spelled
   out then, and cut into words by splitters; the symbols of a word are merged, those of the earliest merge
   first; the post-processor's ids go around all. Most words are one token: whether the merges make it of its
   text is found out when it is first met. */
#define TT__BPE_IDS (1 << 22)       /* a larger id is refused: memory is by id */
#define TT__BPE_TOKEN_BYTES 4096    /* a longer added token is refused: it is looked for at every byte */
#define TT__BPE_NONE UINT32_MAX
enum {
    TT__BPE_STAGES = 16, /* normalizers, splitters or decoders in a row */
    TT__BPE_SHORT = 64   /* bytes of a word whose merges are found by looking through all */
};

typedef enum tt__stage_kind {
    TT__STAGE_NFC, TT__STAGE_PREPEND, TT__STAGE_REPLACE, TT__STAGE_SPACES, TT__STAGE_TRIM,
    TT__STAGE_PRECOMPILED, TT__STAGE_NFD, TT__STAGE_NFKD, TT__STAGE_ACCENTS, TT__STAGE_LOWER,
    TT__STAGE_CLEAN, TT__STAGE_CJK, TT__STAGE_NONSPACING,            /* normalizers, of BERT these three */
    TT__STAGE_REGEX, TT__STAGE_TRIPLES, TT__STAGE_DIGITS, TT__STAGE_PUNCTUATION, TT__STAGE_WHITE,
    TT__STAGE_METASPACE, TT__STAGE_BERT, TT__STAGE_BYTES,                                   /* splitters */
    TT__STAGE_BYTE_FALLBACK, TT__STAGE_FUSE, TT__STAGE_STRIP, TT__STAGE_WORDPIECE           /* decoders */
} tt__stage_kind;

/* The regular expressions that GPT-2 began:
   contractions | prefix? letters+ | digits | ' '? others+ | line ends | white space but its last |
   white space */
typedef struct tt__pattern {
    bool any_case;   /* of contractions: 's 't 're 've 'm 'll 'd */
    bool any_prefix; /* what may stand before letters: anything but a line end or a digit; else a space */
    bool line_ends;  /* others take line ends behind them; white space ends at its last line end */
    int digits;      /* at most so many together; 0: any number, and a space before them */
} tt__pattern;

static const struct { const char *regex; tt__pattern pattern; } tt__patterns[] = {
    {"'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+",
     {false, false, false, 0}}, /* GPT-2 */
    {"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1,3}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|"
     "\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+", {true, true, true, 3}}, /* LLaMA 3 */
    {"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|"
     "\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+", {true, true, true, 1}}, /* Qwen2 */
    {"'(?i:[sdmt]|ll|ve|re)|[^\\r\\n\\p{L}\\p{N}]?+\\p{L}+|\\p{N}{1,3}| ?[^\\s\\p{L}\\p{N}]++[\\r\\n]*|"
     "\\s*[\\r\\n]|\\s+(?!\\S)|\\s+", {true, true, true, 3}}, /* cl100k */
    {"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?+\\p{L}+|\\p{N}{1,3}|"
     " ?[^\\s\\p{L}\\p{N}]++[\\r\\n]*|"
     "\\s*[\\r\\n]|\\s+(?!\\S)|\\s+", {true, true, true, 3}},
};
static const char tt__three_digits[] = "[0-9][0-9][0-9]"; /* Falcon's */

typedef struct tt__stage {
    tt__stage_kind kind;
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
} tt__stage;

typedef struct tt__slice { uint32_t start, bytes; } tt__slice; /* bytes TT__BPE_NONE: there is none */

/* Texts to ids: open addressing, at most half full. */
typedef struct tt__ids_by_text {
    const char *base;
    const tt__slice *slices; /* by id */
    tt__bucket *slots;
    uint32_t mask;
} tt__ids_by_text;

/* Pair UINT64_MAX: free. */
typedef struct tt__bpe_rule { uint64_t pair; uint32_t rank; int32_t id; } tt__bpe_rule;

/* A tree of the bytes of added tokens. */
typedef struct tt__trie_node { int32_t child, sibling, added; uint8_t byte; } tt__trie_node; /* -1: none */
typedef struct tt__trie {
    int32_t root[256];
    tt__trie_node *nodes;
    int count, capacity;
} tt__trie;

/* A tree of the bytes of all tokens: node 0 is its root. An edge is in a hash table with open addressing, at
   most half full: its parent (28 bits), byte (8) and child (28); UINT64_MAX: none. */
typedef struct tt__prefixes {
    uint64_t *edges;
    size_t slots;
    int shift;         /* of a hash, to a slot */
    int32_t *ids;      /* (count) the token that ends at a node; -1: none */
    int count, capacity;
} tt__prefixes;

typedef struct tt__added {
    const char *text;  /* as it is looked for and decoded: normalized, where that is asked for */
    size_t bytes;
    int32_t id;
    bool single_word, lstrip, rstrip, normalized, special;
    bool skipped;      /* special, and its text is as the file has it: left out of what is decoded */
} tt__added;

typedef struct tt__kept_file { const char *name; tt__file_bytes file; } tt__kept_file;

struct tt__bpe {
    tt_context *ctx;
    tt__letters *letters;
    const uint8_t *bits;
    tt__unicode *unicode;         /* of BERT's stages; NULL: there are none */
    uint8_t *low;                 /* (TT__LOW) what it says of the code points that most words have */
    tt__chunk *chunks;            /* the texts of stages and added tokens */
    tt__kept_file kept[6];        /* what tt_tokenizer_save writes */
    int n_kept;
    char *texts, *words_text;     /* of all tokens; what they stand for in a text */
    tt__slice *text, *word;       /* (size) */
    int vocab;                    /* ids below this may be the vocabulary's; others are added */
    tt__ids_by_text by_text, by_word;
    uint8_t *whole;               /* (vocab) does its text become this token? 0: not known, 1: yes, 2: no */
    uint32_t longest;             /* bytes of a word of the vocabulary */
    tt__bpe_rule *merges;
    int merge_shift;
    uint64_t merge_mask;
    bool wordpiece;
    const char *piece;            /* what the tokens that continue a word begin with, of so many bytes */
    size_t piece_bytes;
    int64_t word_chars;           /* a word of more is unknown */
    bool unigram;
    tt__prefixes prefixes;        /* of Unigram, as the two that follow */
    double *scores;               /* (vocab) */
    double unk_score;
    bool fuse_unk, byte_fallback, ignore_merges;
    int unk;                      /* -1: what has no token is left out */
    int32_t bytes[256];           /* BYTES: the token of a byte; -1: none */
    int32_t fallback[256];        /* "<0x0A>" and the like; -1: none */
    bool cuts;                    /* no merge is across the start of a run of U+2581: words end there */
    tt__stage normalizers[TT__BPE_STAGES], splitters[TT__BPE_STAGES], decoders[TT__BPE_STAGES];
    int n_normalizers, n_splitters, n_decoders;
    int mapped_at;                /* splitters from here on see bytes as characters; n_splitters: none */
    bool decodes;                 /* there is a decoder; else tokens are joined by spaces */
    tt__added *added;
    int n_added, cap_added;
    int32_t *added_of;            /* (size) which of these an id is; -1: none */
    tt__trie tries[2];            /* those looked for before and after normalization */
};

static void tt__bpe_free(tt__bpe *b)
{
    if (!b) return;
    tt__chunks_free(b->ctx, &b->chunks);
    for (int i = 0; i < b->n_kept; i++) tt__file_close(b->ctx, &b->kept[i].file);
    void *const owned[] = {b->letters, b->unicode, b->low, b->texts, b->words_text, b->text, b->word,
                           b->by_text.slots, b->by_word.slots, b->whole, b->merges, b->added,
                           b->added_of, b->tries[0].nodes, b->tries[1].nodes, b->prefixes.edges,
                           b->prefixes.ids, b->scores, b};
    tt__free_all(b->ctx, owned, TT__COUNT(owned));
}

/* ---- bytes as characters (GPT-2): the printable ones of Latin-1 are themselves, others U+0100 to U+0143 */

static bool tt__byte_prints(uint32_t b)
{
    return (b >= 0x21 && b <= 0x7E) || (b >= 0xA1 && b <= 0xFF && b != 0xAD);
}

static uint32_t tt__byte_char(uint32_t b)
{
    return tt__byte_prints(b) ? b : 0x100 + (b <= 0x20 ? b : b <= 0xA0 ? b - 0x7F + 33 : 67);
}

static int tt__char_byte(uint32_t c) /* -1: of none */
{
    if (c < 0x100) return tt__byte_prints(c) ? (int)c : -1;
    if (c > 0x143) return -1;
    c -= 0x100;
    return (int)(c < 33 ? c : c < 67 ? c - 33 + 0x7F : 0xAD);
}

/* ---- lookups */

static uint32_t tt__bpe_hash(const char *text, size_t bytes)
{
    uint64_t hash = 0x9E3779B97F4A7C15u ^ bytes, word;
    for (; bytes >= 8; bytes -= 8, text += 8) {
        memcpy(&word, text, 8);
        hash = (hash ^ word) * 0xFF51AFD7ED558CCDu;
        hash ^= hash >> 32;
    }
    word = 0;
    for (size_t i = 0; i < bytes; i++) word |= (uint64_t)(uint8_t)text[i] << 8 * i;
    hash = (hash ^ word) * 0xFF51AFD7ED558CCDu;
    return (uint32_t)(hash >> 32 ^ hash);
}

static tt__bucket *tt__bpe_slot(const tt__ids_by_text *t, const char *text, size_t bytes, uint32_t hash)
{
    for (uint32_t at = hash & t->mask;; at = (at + 1) & t->mask) {
        tt__bucket *slot = &t->slots[at];
        if (slot->id < 0) return slot;
        if (slot->hash != hash) continue;
        const tt__slice *slice = &t->slices[slot->id];
        if (slice->bytes == bytes && memcmp(t->base + slice->start, text, bytes) == 0) return slot;
    }
}

static int tt__bpe_find(const tt__ids_by_text *t, const char *text, size_t bytes) /* -1: none */
{
    return tt__bpe_slot(t, text, bytes, tt__bpe_hash(text, bytes))->id;
}

/* Pair UINT64_MAX: none. */
static const tt__bpe_rule *tt__bpe_merge(const tt__bpe *b, int32_t left, int32_t right)
{
    const uint64_t pair = (uint64_t)(uint32_t)left << 32 | (uint32_t)right;
    uint64_t at = pair * 0x9E3779B97F4A7C15u >> b->merge_shift;
    while (b->merges[at].pair != pair && b->merges[at].pair != UINT64_MAX) at = (at + 1) & b->merge_mask;
    return &b->merges[at];
}
