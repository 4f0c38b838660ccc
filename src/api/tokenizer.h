#pragma once
#include "standard.h"
#include "context.h"

/* ---------------------------------------------------------------------------------------------- tokenizer */

/* Texts to ids and back, equal to `tokenizers` 0.23.3 (and to transformers 5.24.0, but see
   tt_tokenizer_load), of three kinds:
   - BERT's basic tokenizer and WordPiece (Devlin et al. 2019; greedy longest match first), from a vocab.txt:
     one token a line, its number the id, white space at the end of a line left out; or from a tokenizer.json.
   - Byte-pair encoding (Sennrich et al. 2016) from a tokenizer.json: byte-level, as GPT-2, RoBERTa, LLaMA 3,
     Qwen2, Pythia and Falcon have it, or of characters with byte fallback, as LLaMA 2 and Mistral.
   - Unigram (Kudo 2018; of all ways to spell a word with tokens the one with the largest sum of scores) from
     a tokenizer.json, as BigBird, ALBERT, T5, XLM-RoBERTa and Pegasus have it.
   A tokenizer.json may have added tokens; the normalizers Sequence, NFC, NFD, NFKD, StripAccents, Lowercase,
   Prepend, Replace (of a String, or of the regular expressions " {2,}" and "\n"), Strip, Precompiled
   (SentencePiece's) and BertNormalizer; the pre-tokenizers Sequence, ByteLevel (of byte-pair encoding), Split
   (by the regular expressions of GPT-2, LLaMA 3, Qwen2, cl100k and Falcon), Digits, Punctuation,
   WhitespaceSplit, Metaspace and BertPreTokenizer; the post-processors Sequence, ByteLevel,
   TemplateProcessing, RobertaProcessing and BertProcessing; the decoders Sequence, ByteLevel, Replace (of a
   String), ByteFallback, Fuse, Strip, Metaspace and WordPiece. What else a file asks for is refused by name.
   "truncation" and "padding" are not read.
   Immutable: any number of threads may use one. */
typedef struct tt_tokenizer tt_tokenizer;

/* What a token is for. */
typedef enum tt_special_token {
    TT_TOKEN_UNK, TT_TOKEN_BOS, TT_TOKEN_EOS, TT_TOKEN_PAD, TT_TOKEN_CLS, TT_TOKEN_SEP, TT_TOKEN_MASK,
    TT_TOKEN_COUNT
} tt_special_token;

/* WordPiece. Uncased (`lowercase`): lower-cased and accents stripped; cased: neither. */
tt_tokenizer *tt_tokenizer_open(tt_context *ctx, const char *vocab_path, bool lowercase);
/* From a Hugging Face folder:
   - with vocab.txt: WordPiece, with tokenizer_config.json's do_lower_case if that file is there (else true).
     TT_ERR_UNSUPPORTED if that file asks for something else (strip_accents other than do_lower_case, no CJK
     splitting, split_special_tokens).
   - else with tokenizer.json, which decides ids, but for what AutoTokenizer of transformers 5 makes anew of
     the class that tokenizer_class of tokenizer_config.json or config.json names: of GPT2Tokenizer,
     RobertaTokenizer, Qwen2Tokenizer (and of model_type qwen2) and GPTNeoXTokenizer, or, without such a name,
     by model_type, the space before the first word, where add_prefix_space of tokenizer_config.json tells of
     it; of LlamaTokenizer (not byte-level, and not of Mistral) how words are marked: the file has a mark
     before all that stands between special tokens, also before a space, transformers before the first word
     alone (with "legacy": true, before all), unless it has one. Of others transformers may differ: without
     add_prefix_space it puts no space before the first word, BigBirdTokenizer leaves out the file's
     Precompiled, T5Tokenizer and XLMRobertaTokenizer split at all white space first, AlbertTokenizer and
     BertTokenizer take do_lower_case and the like from tokenizer_config.json.
   - else with vocab.json and merges.txt: what tokenizer_class of tokenizer_config.json, or model_type of
     config.json, says of GPT-2 (also where neither says anything), RoBERTa (whose <mask> takes the spaces
     before it) and Qwen2, with tokenizer_config.json's added_tokens_decoder and add_prefix_space. */
tt_tokenizer *tt_tokenizer_load(tt_context *ctx, const char *folder);
/* Writes into a folder what transformers reads: vocab.txt and tokenizer_config.json, or where it was loaded
   from other files these and chat_template.jinja, unchanged. */
tt_status tt_tokenizer_save(const tt_tokenizer *k, const char *folder);
void tt_tokenizer_free(tt_tokenizer *k);
int tt_tokenizer_size(const tt_tokenizer *k); /* the largest id, and 1 */
/* As the vocabulary has it: in byte-level encoding a space is U+0120. NULL: no token has this id. A token
   with a NUL inside, which a tokenizer.json may have, ends there, and is not found by its text. */
const char *tt_tokenizer_token(const tt_tokenizer *k, int id);
int tt_tokenizer_find(const tt_tokenizer *k, const char *token); /* -1 if absent */
/* The id of the token that has this purpose; -1: there is none. Of vocab.txt those of BERT, else what
   tokenizer_config.json, special_tokens_map.json or config.json (bos_token_id and so on) say, in this order;
   TT_TOKEN_EOS, which ends a document, is else "<|endoftext|>" if there is one, also where config.json names
   a token that ordinary texts have, which the logger is warned of. */
int tt_tokenizer_special(const tt_tokenizer *k, tt_special_token token);
/* Puts the ids of a text into ids (room for max_tokens), cut to max_tokens with those around it: [CLS] and
   [SEP] of WordPiece, else what the post-processor says. Returns how many; 0 if max_tokens has no room for
   those around; -1: out of memory (texts of more than 4096 bytes take some where they are normalized, as do
   words of more than 64 bytes in byte-pair encoding, and all texts with Metaspace or Unigram). Invalid UTF-8
   bytes count as U+FFFD, which WordPiece drops. A special token spelled out in a text, such as [SEP] in
   capitals or <|endoftext|>, becomes that token if the vocabulary has it, as in transformers: a text can
   forge the structure of a sequence, so remove these from texts that you don't trust. */
int tt_tokenize(const tt_tokenizer *k, const char *text, size_t bytes, int32_t *ids, int max_tokens);
/* Returns how many ids a whole text has, of which the first `room` are in ids; with those around it if
   `special`. -1: out of memory. */
int64_t tt_tokenizer_encode(const tt_tokenizer *k, const char *text, size_t bytes, bool special, int32_t *ids,
                            int64_t room);
/* Writes the text of n ids to `to`, always terminated, cut at capacity (0: not written). Returns the bytes of
   all of it, which are UTF-8 and may hold NULs: U+FFFD stands for bytes that make no character, so that of a
   text that is still growing the last character may change. Ids without a token are left out, as are special
   tokens if skip_special. -1: out of memory. */
int64_t tt_tokenizer_decode(const tt_tokenizer *k, const int32_t *ids, int64_t n, bool skip_special, char *to,
                            size_t capacity);

/* The same while ids come, as fast for the last as for the first: `put` returns what is certain of the text
   by then and was not returned before, and `end` the rest, which together are the text of all ids. They are
   valid until the next call, and not terminated. A character whose last bytes are to come is waited for, as
   is the end of a run of tokens for single bytes, which are a text together or none. NULL: out of memory. */
typedef struct tt_decode_stream tt_decode_stream;
tt_decode_stream *tt_decode_stream_new(const tt_tokenizer *k, bool skip_special);
const char *tt_decode_stream_put(tt_decode_stream *s, const int32_t *ids, int64_t n, size_t *bytes);
const char *tt_decode_stream_end(tt_decode_stream *s, size_t *bytes);
void tt_decode_stream_free(tt_decode_stream *s);
