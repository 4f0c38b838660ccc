#pragma once
#include "standard.h"
#include "context.h"

/* ---------------------------------------------------------------------------------------------- tokenizer */

/* Converts texts to ids and back, with the results of the Python package tokenizers 0.23.3 (and of
   transformers 5.24.0, except as tt_tokenizer_load says). There are three kinds:
   - BERT's basic tokenizer and WordPiece (Devlin et al. 2019; greedy longest match first), from a vocab.txt
     with one token a line, whose number is the id (white space at the end of a line is ignored); or from a
     tokenizer.json.
   - Byte-pair encoding (Sennrich et al. 2016) from a tokenizer.json: byte-level, as in GPT-2, RoBERTa, LLaMA
     3, Qwen2, Pythia and Falcon, or of characters with byte fallback, as in LLaMA 2 and Mistral.
   - Unigram (Kudo 2018: of all ways to divide a word into tokens, the way with the largest sum of scores)
     from a tokenizer.json, as in BigBird, ALBERT, T5, XLM-RoBERTa and Pegasus.
   A tokenizer.json may have added tokens; the normalizers Sequence, NFC, NFD, NFKD, StripAccents, Lowercase,
   Prepend, Replace (of a String, or of the regular expressions " {2,}" and "\n"), Strip, Precompiled
   (SentencePiece's) and BertNormalizer; the pre-tokenizers Sequence, ByteLevel (of byte-pair encoding), Split
   (by the regular expressions of GPT-2, LLaMA 3, Qwen2, cl100k and Falcon), Digits, Punctuation,
   WhitespaceSplit, Metaspace and BertPreTokenizer; the post-processors Sequence, ByteLevel,
   TemplateProcessing, RobertaProcessing and BertProcessing; the decoders Sequence, ByteLevel, Replace (of a
   String), ByteFallback, Fuse, Strip, Metaspace and WordPiece. Anything else in the file is refused by name,
   except "truncation" and "padding", which are ignored.
   A tokenizer is immutable: any number of threads may use it. */
typedef struct tt_tokenizer tt_tokenizer;

/* Purpose of a special token. */
typedef enum tt_special_token {
    TT_TOKEN_UNK, TT_TOKEN_BOS, TT_TOKEN_EOS, TT_TOKEN_PAD, TT_TOKEN_CLS, TT_TOKEN_SEP, TT_TOKEN_MASK,
    TT_TOKEN_COUNT
} tt_special_token;

/* Makes a WordPiece tokenizer from a vocab.txt. With `lowercase`, texts lose capitals and accents. */
tt_tokenizer *tt_tokenizer_open(tt_context *ctx, const char *vocab_path, bool lowercase);
/* Loads a tokenizer from a Hugging Face folder:
   - With vocab.txt: WordPiece. lowercase is tokenizer_config.json's do_lower_case, or true without that file.
     TT_ERR_UNSUPPORTED if that file asks for something else (strip_accents other than do_lower_case, no CJK
     splitting, split_special_tokens).
   - Else with tokenizer.json, which decides the ids, except for what AutoTokenizer of transformers 5 rebuilds
     for the class that tokenizer_class of tokenizer_config.json or config.json names. For GPT2Tokenizer,
     RobertaTokenizer, Qwen2Tokenizer (also for model_type qwen2) and GPTNeoXTokenizer, or, without such a
     name, by model_type, AutoTokenizer rebuilds the space before the first word, if tokenizer_config.json has
     add_prefix_space. For LlamaTokenizer (not byte-level, and not Mistral's) AutoTokenizer rebuilds the mark
     of a word: tokenizer.json puts a mark before each text between special tokens, even before a space;
     transformers puts it before the first word only (with "legacy": true, before each such text), unless a
     mark is already there. For other classes transformers may differ: without add_prefix_space transformers
     puts no space before the first word, BigBirdTokenizer ignores the file's Precompiled, T5Tokenizer and
     XLMRobertaTokenizer split at all white space first, AlbertTokenizer and BertTokenizer read do_lower_case
     and so on from tokenizer_config.json.
   - Else with vocab.json and merges.txt: GPT-2's, RoBERTa's (whose <mask> includes the spaces before it) or
     Qwen2's tokenizer, as tokenizer_class of tokenizer_config.json or model_type of config.json says (GPT-2's
     if neither does), with tokenizer_config.json's added_tokens_decoder and add_prefix_space. */
tt_tokenizer *tt_tokenizer_load(tt_context *ctx, const char *folder);
/* Writes the files that transformers reads into a folder: vocab.txt and tokenizer_config.json, or, for a
   tokenizer loaded from other files, these files and chat_template.jinja, unchanged. */
tt_status tt_tokenizer_save(const tt_tokenizer *k, const char *folder);
void tt_tokenizer_free(tt_tokenizer *k);
int tt_tokenizer_size(const tt_tokenizer *k); /* the largest id + 1 */
/* Returns a token as the vocabulary has it (in byte-level encoding a space is U+0120), or NULL if no token
   has this id. A token with a NUL inside, which a tokenizer.json may have, is cut there; tt_tokenizer_find
   does not find it. */
const char *tt_tokenizer_token(const tt_tokenizer *k, int id);
int tt_tokenizer_find(const tt_tokenizer *k, const char *token); /* returns -1 if absent */
/* Returns the id of the token with this purpose, or -1. With vocab.txt the special tokens are BERT's.
   Otherwise tokenizer_config.json, special_tokens_map.json and config.json (bos_token_id and so on), in this
   order, name the special tokens. If none of the files names TT_TOKEN_EOS, which ends a document, that token
   is "<|endoftext|>" if it exists. If config.json names a token that ordinary texts contain, TT_TOKEN_EOS is
   also "<|endoftext|>", and the logger gets a warning. */
int tt_tokenizer_special(const tt_tokenizer *k, tt_special_token token);
/* The range of bytes [begin, end) of a text. */
typedef struct tt_span { size_t begin, end; } tt_span;

/* One text or a pair of texts to be encoded, and the arrays that receive the result. Set all other fields to
   0. */
typedef struct tt_encoding {
    const char *text;
    size_t bytes;
    const char *pair;   /* the second text of a pair; NULL: one text */
    size_t pair_bytes;
    bool special;       /* adds the tokens around the texts: [CLS] and [SEP] of WordPiece, else those of the
                           post-processor */
    int max_tokens;     /* cuts texts at their ends so that no more ids than this number result; 0: texts are
                           whole. The longer text of a pair is cut until both are equally long, then both are
                           cut, as truncation "longest_first" of transformers does */
    int64_t room;       /* number of ids for which each of the arrays has room */
    int32_t *ids;       /* (room) receives the ids; NULL: not wanted */
    int32_t *types;     /* (room) the token type of each id: that of the post-processor's template, or,
                           without a template, 0 in the first text and 1 in the second; NULL: not wanted */
    tt_span *spans;     /* (room) the bytes of its text, the first or the second, that each id comes from;
                           tokens around the texts have {0, 0}; NULL: not wanted. Spans are the offsets of the
                           Python package tokenizers, in bytes instead of characters. A character that a
                           normalizer makes has the span of the character that it replaces. A token for a part
                           of a character has the span of the character. "trim_offsets" of the post-processor
                           leaves out white space at the ends */
} tt_encoding;

/* Encodes one text or a pair, and writes the first `room` results into the arrays of e. Returns the number of
   ids; 0 if max_tokens has no room for the tokens around the texts; -1 for a pair if tt_tokenizer_pairs is
   false, and when out of memory. The function needs memory for normalized texts of more than 4096 bytes, for
   words of more than 64 bytes in byte-pair encoding, and for all texts with Metaspace or Unigram. Invalid
   UTF-8 bytes become U+FFFD, which WordPiece drops. As in transformers, a special token spelled out in a
   text, such as [SEP] in capitals or <|endoftext|>, becomes that token if the vocabulary has it: a text can
   forge the structure of a sequence, so remove such words from texts that you don't trust. */
int64_t tt_tokenizer_encode(const tt_tokenizer *k, const tt_encoding *e);
/* Returns whether pairs of texts can be encoded. The post-processor must have a template for pairs, which has
   the first text once and then the second text once. */
bool tt_tokenizer_pairs(const tt_tokenizer *k);
/* Writes the ids of one text, special tokens included, as tt_tokenizer_encode does. ids: array for max_tokens
   ids. */
int tt_tokenize(const tt_tokenizer *k, const char *text, size_t bytes, int32_t *ids, int max_tokens);
/* Writes the text of n ids to `to`, always terminated, cut at capacity (0: not written). Returns the bytes of
   the whole text, or -1 when out of memory. The text is UTF-8 and may contain NULs; U+FFFD replaces bytes
   that form no character, so the last character of a growing text may change. Ids without a token are left
   out. With skip_special, special tokens are left out, too. */
int64_t tt_tokenizer_decode(const tt_tokenizer *k, const int32_t *ids, int64_t n, bool skip_special, char *to,
                            size_t capacity);

/* A message of a conversation, in UTF-8. Templates know the roles "system", "user" and "assistant", whose
   messages are the answers. */
typedef struct tt_message { const char *role, *content; } tt_message;
/* Writes the text of a conversation of n messages by the chat template of the tokenizer's folder, which is
   chat_template.jinja or "chat_template" of tokenizer_config.json. The text is cut at capacity (0: not
   written) and always terminated. prompt: the start of an answer follows the messages. Returns the bytes of
   the whole text, or -1 after an error. Encode the text without special tokens, which it spells out.
   Templates are programs in Jinja, and the text has the bytes of transformers' apply_chat_template. Tags that
   the interpreter lacks, such as call and include, are refused by name and line; filters, tests, methods and
   numbers that the templates of decoders do not need are refused when the template uses them. strftime_now
   counts as undefined, so that training data does not depend on the date. The function sets the error of the
   tokenizer's context: call it from that context's thread. */
int64_t tt_tokenizer_chat(const tt_tokenizer *k, const tt_message *messages, int n, bool prompt, char *to,
                          size_t capacity);

/* Decodes ids as they come, in constant time for each. `put` returns the text that is certain so far and was
   not returned before. `end` returns the remaining text; all returned texts together are the text of all ids.
   The text is valid until the next call, and not terminated. The stream holds back an incomplete character,
   and an incomplete run of tokens for single bytes, because only whole runs form texts. `put` and `end`
   return NULL when out of memory. */
typedef struct tt_decode_stream tt_decode_stream;
tt_decode_stream *tt_decode_stream_new(const tt_tokenizer *k, bool skip_special);
const char *tt_decode_stream_put(tt_decode_stream *s, const int32_t *ids, int64_t n, size_t *bytes);
const char *tt_decode_stream_end(tt_decode_stream *s, size_t *bytes);
void tt_decode_stream_free(tt_decode_stream *s);
