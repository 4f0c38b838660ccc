#!/usr/bin/env python3
"""Writes golden cases of a tokenizer.json for byte-pair, Unigram and WordPiece models: small files of each
kind, trained here, and texts with their ids, and the decoded texts of these ids, as Hugging Face gives them.

    python tests/golden/make_bpe.py

writes beside this script, for each KIND of pipelines(),
    bpe/KIND/tokenizer.json    the pipeline of that model, with a vocabulary of some hundred tokens
    bpe/KIND/cases.tsv         `text<TAB>ids<TAB>decoded<TAB>decoded without special tokens`, escaped as in
                               make_tokens.py; the ids include the special tokens around the text
and bpe/gpt2_files/, the vocab.json and merges.txt of gpt2.

needs: tokenizers, transformers (Hugging Face); sentencepiece, protobuf. Invalid UTF-8 is tested in C: it
counts as U+FFFD, as in Python's decoding with errors="replace". See also compare_bpe.py.
"""
import io
import json
import os
import random
import tempfile
import unicodedata

import sentencepiece
from make_tokens import TEXTS, escape
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from sentencepiece import sentencepiece_model_pb2
from tokenizers.trainers import BpeTrainer, UnigramTrainer, WordPieceTrainer

HERE = os.path.dirname(os.path.abspath(__file__))
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
          r"\s*[\r\n]+|\s+(?!\S)|\s+")
QWEN2 = LLAMA3.replace("{1,3}", "")
CL100K = (r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*|"
          r"\s*[\r\n]|\s+(?!\S)|\s+")
CODE = '''
static int64_t tt__min(int64_t a, int64_t b) { return a < b ? a : b; }

    for (int i = 0; i < 1000; i++) {
        if (text[i] == '\\n' || !strcmp(name, "it's")) continue; /* a comment */
\t\tsum += 0x1F * 3.1415926535;
    }
def f(x, *args):
    return [x ** 2 for _ in range(10)]  # we'll see, they've said; I'm sure you'd know
'''
PROSE = """The quick brown fox jumps over the lazy dog. It's said that they've been there, and we'll see what they'd do.
In 1984 there were 1,234,567 people; 12345678901234567890 is a number. El niño comió en el café. Die Straße ist schön.
Съешь же ещё этих мягких французских булок. 日本語の文章です。中文也是文字。한국어 문장입니다. नमस्ते दुनिया. مرحبا بالعالم. שלום עולם.
The training of transformers, the tokenizers of transformers, and the transformers of training: there and here and everywhere."""


def bytes_trainer(size, specials):
    return BpeTrainer(vocab_size=size, show_progress=False, special_tokens=specials,
                      initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()))


def metaspace_trainer(size, split_spaces=True):
    specials = ["<unk>", "<s>", "</s>"] + [f"<0x{b:02X}>" for b in range(256)]
    return BpeTrainer(vocab_size=size, show_progress=False, special_tokens=specials, limit_alphabet=60)


def train(tokenizer, trainer):
    texts = ([PROSE] * 3 + [CODE] * 3 + TEXTS) * 2
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def byte_level(size, specials, normalizer=None, pre=None, post=None):
    t = Tokenizer(models.BPE())
    if normalizer:
        t.normalizer = normalizer
    t.pre_tokenizer = pre or pre_tokenizers.ByteLevel(add_prefix_space=False)
    t.decoder = decoders.ByteLevel()
    train(t, bytes_trainer(size, specials))
    t.post_processor = post(t) if post else processors.ByteLevel(trim_offsets=False)
    return t


def split_and_bytes(regex, behavior="isolated", invert=False):
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(regex), behavior, invert=invert),
                                    pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def gpt2():
    return byte_level(500, [AddedToken("<|endoftext|>", normalized=True, special=True)])


def roberta():
    specials = ["<s>", "<pad>", "</s>", "<unk>", AddedToken("<mask>", lstrip=True, special=True, normalized=False)]
    return byte_level(520, specials, pre=pre_tokenizers.ByteLevel(add_prefix_space=True),
                      post=lambda t: processors.RobertaProcessing(
                          ("</s>", t.token_to_id("</s>")), ("<s>", t.token_to_id("<s>")), add_prefix_space=True))


def with_start(t, token):
    start = processors.TemplateProcessing(single=f"{token} $A", pair=f"{token} $A {token}:1 $B:1",
                                          special_tokens=[(token, t.token_to_id(token))])
    return processors.Sequence([processors.ByteLevel(trim_offsets=False), start])


def llama3():
    """Returns a tokenizer like Llama 3's, whose ignore_merges matters because some merges are removed."""
    specials = ["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"]
    t = byte_level(520, specials, pre=split_and_bytes(LLAMA3), post=lambda t: with_start(t, "<|begin_of_text|>"))
    j = json.loads(t.to_str())
    j["model"]["ignore_merges"] = True
    del j["model"]["merges"][7::23]
    return Tokenizer.from_str(json.dumps(j))


def qwen2():
    t = byte_level(480, [], normalizer=normalizers.NFC(), pre=split_and_bytes(QWEN2))
    t.add_special_tokens([AddedToken(x, normalized=False) for x in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")])
    return t


def cl100k():
    return byte_level(480, ["<|endoftext|>"], pre=split_and_bytes(CL100K, "removed", True))


def neox():
    """Returns a tokenizer like Pythia's: runs of spaces are added tokens that are not special."""
    t = byte_level(470, ["<|endoftext|>", "<|padding|>"], normalizer=normalizers.NFC())
    t.add_tokens([AddedToken(" " * n, normalized=True) for n in range(24, 1, -1)])
    return t


def falcon():
    pre = pre_tokenizers.Sequence([
        pre_tokenizers.Punctuation("contiguous"), pre_tokenizers.ByteLevel(add_prefix_space=False),
        pre_tokenizers.Digits(individual_digits=False), pre_tokenizers.Split(Regex("[0-9][0-9][0-9]"), "isolated")])
    return byte_level(480, [">>TITLE<<", ">>ABSTRACT<<", "<|endoftext|>"], pre=pre)


def starcoder():
    pre = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True),
                                   pre_tokenizers.ByteLevel(add_prefix_space=False)])
    return byte_level(470, ["<|endoftext|>", "<fim_prefix>"], pre=pre)


def llama2(split=None, scheme="first"):
    """Returns a tokenizer like LLaMA 2's: characters, with byte fallback. If `split` is None, normalizers
    replace spaces, as in LLaMA 2's file."""
    t = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    train_pre = pre_tokenizers.Metaspace(prepend_scheme="always")
    t.pre_tokenizer = train_pre
    train(t, metaspace_trainer(620))
    start = processors.TemplateProcessing(single="<s> $A", pair="<s> $A <s>:1 $B:1",
                                          special_tokens=[("<s>", t.token_to_id("<s>"))])
    t.post_processor = start
    space = "\u2581"
    steps = [decoders.Replace(space, " "), decoders.ByteFallback(), decoders.Fuse()]
    j = json.loads(t.to_str())
    j["added_tokens"] = j["added_tokens"][:3]
    if split is None:
        j["pre_tokenizer"] = None
        t = Tokenizer.from_str(json.dumps(j))
        t.normalizer = normalizers.Sequence([normalizers.Prepend(space), normalizers.Replace(" ", space)])
        steps.append(decoders.Strip(" ", 1, 0))
        t.decoder = decoders.Sequence(steps)
    else:
        t = Tokenizer.from_str(json.dumps(j))
        t.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=split)
        t.decoder = decoders.Metaspace(prepend_scheme=scheme) if split else decoders.Sequence(
            steps + [decoders.Strip(" ", 1, 0)])
    return t


def mistral():
    """Returns a tokenizer like Mistral's: a Metaspace that doesn't split, added tokens with their options."""
    t = llama2(split=False)
    t.add_special_tokens([AddedToken("[INST]", normalized=False), AddedToken("[/INST]", rstrip=True, normalized=False)])
    t.add_tokens([AddedToken("quick", single_word=True, normalized=False), AddedToken("<tool>", normalized=True),
                  AddedToken("<wide>", lstrip=True, rstrip=True, normalized=False)])
    return t


def metaspace():
    return llama2(split=True, scheme="always")


def unknown():
    """Returns a BPE without byte fallback: unknown characters in a row are one <unk>, merges cross spaces."""
    t = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
    t.normalizer = normalizers.Replace(" ", "\u2581")
    train(t, BpeTrainer(vocab_size=300, show_progress=False, special_tokens=["<unk>", "<s>", "</s>"],
                        limit_alphabet=50, max_token_length=12))
    t.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.Fuse()])
    t.add_tokens([AddedToken("<tool use>", normalized=True)])
    return t


def charsmap(**options):
    """Returns normalization rules as SentencePiece compiles them: the rules that the options name, or else
    some rules of NFKC and some invented rules."""
    rules = {"\r\n": "\n", "\u0001": "", "\u200b": "", "\u3000": " ", "\u00a0": " ", "A\u030a\u0301": "x", "qu": "kw",
             "\u0915\u093c": "q", "\U0001f468": "man", "\u00a9": "(c)", "\u0301": "", "\u1100\u1161": "\uac00"}
    for c in [*range(0xA1, 0x250), *range(0x1E00, 0x1E20), *range(0xFB00, 0xFB07), *range(0xFF01, 0xFF20), 0x2460, 0x2126,
              0xFDFA]:
        to = unicodedata.normalize("NFKC", chr(c))
        if to != chr(c):
            rules[chr(c)] = to
        elif len(parts := unicodedata.normalize("NFD", chr(c))) > 1:
            rules[parts] = to
    with tempfile.TemporaryDirectory() as folder:
        path, model = os.path.join(folder, "rules.tsv"), io.BytesIO()
        with open(path, "w") as f:
            for a, b in sorted(rules.items()):
                f.write("\t".join(" ".join(f"{ord(c):X}" for c in x) for x in (a, b)) + "\n")
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(PROSE.split("\n")), model_writer=model, vocab_size=300, minloglevel=2,
            hard_vocab_limit=False, **(options or {"normalization_rule_tsv": path}))
    proto = sentencepiece_model_pb2.ModelProto()
    proto.ParseFromString(model.getvalue())
    return proto.normalizer_spec.precompiled_charsmap


def unigram(size, specials, normalizer, pre, texts=None):
    t = Tokenizer(models.Unigram())
    t.normalizer, t.pre_tokenizer = normalizer, pre
    t.decoder = decoders.Metaspace()
    trainer = UnigramTrainer(vocab_size=size, show_progress=False, special_tokens=specials, unk_token="<unk>",
                             max_piece_length=12)
    t.train_from_iterator(texts or ([PROSE] * 3 + [CODE] * 3 + TEXTS) * 2, trainer)
    return t


def big_bird(size=700, rules=None, texts=None):
    spaces = normalizers.Replace(Regex(" {2,}"), " ")
    t = unigram(size, ["<pad>", "</s>", "<s>", "<unk>", "[CLS]", "[SEP]"],
                normalizers.Sequence([normalizers.Precompiled(rules or charsmap()), spaces]),
                pre_tokenizers.Metaspace(), texts)
    t.add_special_tokens([AddedToken("[MASK]", lstrip=True, normalized=True)])
    t.post_processor = processors.TemplateProcessing(
        single="[CLS]:0 $A:0 [SEP]:0", pair="[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1",
        special_tokens=[(x, t.token_to_id(x)) for x in ("[CLS]", "[SEP]")])
    return t


def albert(size=600, rules=None, texts=None):
    quotes = [normalizers.Replace(x, '"') for x in ("``", "''")]
    steps = [normalizers.NFKD(), normalizers.StripAccents(), normalizers.Lowercase(),
             normalizers.Precompiled(rules or charsmap())]
    spaces = [normalizers.Replace(Regex(" {2,}"), " ")] if size == 600 else []
    t = unigram(size, ["<pad>", "<unk>", "[CLS]", "[SEP]"], normalizers.Sequence(quotes + steps + spaces),
                pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()]), texts)
    t.add_special_tokens([AddedToken("[MASK]", lstrip=True, normalized=False)])
    t.post_processor = processors.TemplateProcessing(
        single="[CLS]:0 $A:0 [SEP]:0", pair="[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1",
        special_tokens=[(x, t.token_to_id(x)) for x in ("[CLS]", "[SEP]")])
    return t


def t5(size=500, rules=None, texts=None):
    """Returns a tokenizer like T5's: words between white space. Unlike in T5, unknown characters become
    bytes."""
    mark = "\u2581"
    t = unigram(size, ["<pad>", "</s>", "<unk>"] + [f"<0x{b:02X}>" for b in range(256)],
                normalizers.Sequence([normalizers.Strip(left=True, right=True), normalizers.Precompiled(rules or charsmap()),
                                      normalizers.Replace(Regex(" {2,}"), mark), normalizers.Replace(Regex("\\n"), " ")]),
                pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(),
                                         pre_tokenizers.Metaspace(prepend_scheme="first" if size == 500 else "always")]), texts)
    j = json.loads(t.to_str())
    j["model"]["byte_fallback"] = True
    j["added_tokens"] = j["added_tokens"][:3]
    t = Tokenizer.from_str(json.dumps(j))
    t.decoder = decoders.Sequence([decoders.Replace(mark, " "), decoders.ByteFallback(), decoders.Fuse()])
    t.add_special_tokens([AddedToken(f"<extra_id_{n}>", normalized=False) for n in range(3)])
    t.post_processor = processors.TemplateProcessing(
        single="$A </s>", pair="$A </s> $B </s>", special_tokens=[("</s>", t.token_to_id("</s>"))])
    return t


def wordpiece(size=500, prefix="##", most=100, post="template", **options):
    """Returns a tokenizer like BERT's. The added token Quick-Tool is lower-cased with the text around it."""
    specials = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    t = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    t.normalizer, t.pre_tokenizer = normalizers.BertNormalizer(**options), pre_tokenizers.BertPreTokenizer()
    train(t, WordPieceTrainer(vocab_size=size, show_progress=False, special_tokens=specials, limit_alphabet=90,
                              continuing_subword_prefix=prefix))
    t.model.max_input_chars_per_word, t.model.continuing_subword_prefix = most, prefix
    t.decoder = decoders.WordPiece(prefix=prefix, cleanup=post == "template")
    ids = [(x, t.token_to_id(x)) for x in ("[SEP]", "[CLS]")]
    t.post_processor = processors.BertProcessing(*ids) if post != "template" else processors.TemplateProcessing(
        single="[CLS]:0 $A:0 [SEP]:0", pair="[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1", special_tokens=ids)
    t.add_tokens([AddedToken("Quick-Tool", normalized=True), AddedToken("<wide>", lstrip=True, normalized=False)])
    return t


def wordpiece_lower():
    """Returns a tokenizer that lower-cases, keeps accents, treats Chinese characters like other letters,
    accepts words of at most 12 characters, and has the prefix "@@" in place of "##"."""
    return wordpiece(400, "@@", 12, "bert", lowercase=True, strip_accents=False, handle_chinese_chars=False)


def wordpiece_cased():
    """Returns a tokenizer that keeps upper case and removes accents."""
    return wordpiece(400, lowercase=False, strip_accents=True)


def front(steps, pre):
    """Returns a tokenizer of bytes, with normalizers and then a Metaspace that marks the first character of a
    text."""
    vocab = ["<unk>"] + [f"<0x{b:02X}>" for b in range(256)] + ["\u2581"]
    t = Tokenizer(models.BPE({x: i for i, x in enumerate(vocab)}, [], byte_fallback=True, unk_token="<unk>"))
    if steps:
        t.normalizer = normalizers.Sequence(steps)
    t.pre_tokenizer = pre_tokenizers.Sequence(pre + [pre_tokenizers.Metaspace(prepend_scheme="first")])
    t.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    return t


def front_precompiled():
    return front([normalizers.NFKD(), normalizers.Precompiled(charsmap())], [pre_tokenizers.WhitespaceSplit()])


def front_nfc():
    return front([normalizers.NFD(), normalizers.NFC(), normalizers.Lowercase()], [pre_tokenizers.WhitespaceSplit()])


def front_strip():
    return front([normalizers.NFKD(), normalizers.StripAccents(), normalizers.Strip()], [])


def front_replace():
    return front([normalizers.NFD(), normalizers.Prepend(" a"), normalizers.Replace(" ", "\u2581 "), normalizers.NFC()],
                 [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Digits(individual_digits=True)])


FRONTS = front_precompiled, front_nfc, front_strip, front_replace


def fronts():
    """Returns tokenizers with many normalizers before each of several splitters: too many to be committed."""
    n, p = normalizers, pre_tokenizers
    nmt, own = (n.Precompiled(x) for x in (charsmap(normalization_rule_name="nmt_nfkc"), charsmap()))
    nfc, nfd, nfkd, lower, accents, strip = n.NFC(), n.NFD(), n.NFKD(), n.Lowercase(), n.StripAccents(), n.Strip()
    steps = {
        "none": [], "Strip": [strip], "NFKD Precompiled": [nfkd, nmt], "NFD NFC Lowercase": [nfd, nfc, lower], "NFC": [nfc], "NFD": [nfd],
        "NFKD": [nfkd], "Precompiled": [nmt], "Precompiled Strip": [nmt, strip], "NFKD Strip": [nfkd, strip], "NFD StripAccents": [nfd, accents],
        "NFKD NFC": [nfkd, nfc], "NFKD StripAccents NFC Strip": [nfkd, accents, nfc, strip], "Prepend": [n.Prepend("a b")],
        "NFKD Prepend Strip": [nfkd, n.Prepend(" \u2581"), strip], "Replace": [n.Replace(" ", "")], "NFKD Replace NFC": [nfkd, n.Replace(" ", " \u2581 "), nfc],
        "NFKD spaces Precompiled": [nfkd, n.Replace(Regex(" {2,}"), "\u2581"), nmt], "ALBERT's": [n.Replace("``", '"'), nfkd, accents, lower, nmt],
        "own Strip": [own, strip], "NFD own": [nfd, own], "Precompiled NFKD Precompiled NFC": [nmt, nfkd, nmt, nfc],
    }
    splits = {
        "": [], ", WhitespaceSplit": [p.WhitespaceSplit()], ", WhitespaceSplit Digits": [p.WhitespaceSplit(), p.Digits()],
        ", Digits Punctuation": [p.Digits(individual_digits=True), p.Punctuation()],
    }
    return {f"front: {a}{b}": front(x, y) for a, x in steps.items() for b, y in splits.items()}


def front_texts(rng, count):
    """Returns short texts that begin with characters that normalizers split, join, remove or move."""
    first = list(" \u00a0\u00a8\u00b4\u0344\u1fbd\u1fc1\u0301\u0323\u0300\u0327\u0fb2\u0f71\u3099\u00e9\u1e69\u1ec7\u2003\u0001\u200b\u00ad\uac00\u1100\u1161\u11a8"
                 "\ud55c\u212b\u0130\ufb01\ufdfa\u2025\ufe70\u304b\u0385\u1fed\u0cca\u0958\U0001d15e\naB1.") + [" a", "\r\n"]
    return ["".join(rng.choice(first) for _ in range(rng.randrange(1, 9))) + rng.choice(["", "x y", "1 b"]) for _ in range(count)]


def large():
    """Returns kinds that are too large to be committed: they have SentencePiece's default normalization, and
    thousands of tokens."""
    novel = os.path.join(HERE, "..", "..", "examples", "data", "pride_and_prejudice.txt")
    with open(novel, encoding="utf-8") as f:
        texts = f.read().split("\n\n") + [PROSE, CODE, *TEXTS, *MORE]
    rules = charsmap(normalization_rule_name="nmt_nfkc")
    return {"big_bird, nmt_nfkc": big_bird(8000, rules, texts), "t5, nmt_nfkc": t5(4000, rules, texts),
            "albert, nmt_nfkc": albert(4000, rules, texts),
            "big_bird, nmt_nfkc_cf": big_bird(2000, charsmap(normalization_rule_name="nmt_nfkc_cf"), texts)}


def pipelines():
    return [wordpiece, wordpiece_lower, wordpiece_cased, big_bird, albert, t5, gpt2, roberta, llama3, qwen2, cl100k, neox, falcon, starcoder, llama2, mistral, metaspace, unknown, *FRONTS]


MORE = [
    "it's IT'S we'll WE'LL they've I'm you'd 'sit 'tis 're'll ''s ' 's'S\u2019s", "'\u017f '\u017fa a'\u017f 'K '\u212a 'ſ", "don't\u00a0won't",
    "1 12 123 1234 12345 123456 1234567", " 1 12 123 1234", "\u0661\u0662\u0663\u0664 \u00b2\u00b3 \u00bd\u00be \u2163\u2164 \u4e00\u4e8c \U0001d7ce\U0001d7cf\U0001d7d0\U0001d7d1", "a1b2c3 3x+4y=5z", "1.5e-10 0xFF 1_000",
    "a  b", "a   b", "a    b     c      d", "   a", "a   ", " ", "  ", "   ", "\n\n\n", " \n \n ", "\t\ta", "a\t \tb", "a\r\n\r\nb", "a \n\n b", "  \n  x", "a\n\n   b", "\u3000\u3000a", "a\u00a0\u00a0b", "a\u2028\u2029b", "\u0085a\u0085\u0085b", "a \u200b b",
    "!!!\n\n???", "...\r\n...", " !\n", "a!\nb", "#include <stdio.h>\n", "int main(void)\n{\n\treturn 0;\n}\n", CODE, PROSE, "x" * 100, "ab" * 200, " " * 100, "=" * 77, "a" * 70 + " " + "the" * 40,
    "\U0001f468\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466 \U0001f3f3\ufe0f\u200d\U0001f308 \U0001f44d\U0001f3fd", "\u2764\ufe0f\u200d\U0001f525", "\U0001f1e9\U0001f1ea\U0001f1eb\U0001f1f7", "a\u0301e\u0301 n\u0303 \u1112\u1161\u11ab \uac00\u11a8 \u0915\u093c \u0958 \u0344 \u212b \ufa0e \uf900 \U0001d15e \u1e9b\u0323", "q\u0323\u0307 q\u0307\u0323 \u0307\u0323a s\u0323\u0307", "\u0f73\u0f71\u0f72 \u0345\u0301\u0334",
    "<|endoftext|>", "a<|endoftext|>b", "a <|endoftext|> b<|endoftext|><|endoftext|>", "<|endoftext", "<s>a</s>", "a <mask> b", "a   <mask>   b", "<mask><mask>", "<s> a <unk> <pad>", "<|begin_of_text|>hi<|eot_id|>", "<|im_start|>user\nhi<|im_end|>\n", ">>TITLE<<x>>ABSTRACT<<", "[INST] hi [/INST]   there [/INST]\n\nx", "a quick fox, quickly quick", "quick", "\u00e9quick quick\u0301 (quick) _quick", "<tool>a <tool> b", "<wide> <wide>   <wide>a", " <wide>", "a <tool use> b\u2581<tool\u2581use>", "  <s>  ",
    "<0x41><0x0A> <0xZZ>", "\u2581a\u2581\u2581b", "a\u2581 b", " \u2581", "\u0120a \u010a \u00a0", "\u0000a\u0000", "\u0001\u0002\u007f\u0080\u009f", "a\ufffdb\ufffd\ufffd", "\ufeffa", "\ud7ff\ue000\uffff\U0010ffff", "<fim_prefix>def f():", "Hello world! Hello  world!  ", "a\u0130\u0131\u01c5", "\u1c89\ua7cb \U00016d40 \u0897", "\u0f20\u0f2a \u3007\u3021 \U00010107",
]


# Texts for tokenizers with a Precompiled: graphemes, characters that the rules of the Precompiled change, and
# unknown characters beside <unk>.
PRECOMPILED = [
    "e\u0301 n\u0303 qu QU \u1100\u1161 A\u030a\u0301x \u0915\u093cx", "a\u200b\u0301 \u00a9\u200d\u2764\u0301 \u0915\u094d\u0915\u0301",
    "\uff28\uff45 \u2460 \ufb01x \ufdfa", "\r\n\r\r\n", "  a", "<unk>\u4e00<unk>", "<extra_id_0> x<extra_id_2>",
    "a[MASK] b  [MASK]c [SEP]", "\u00b4", "\u00b4 x", "\u00a8\u00b4x",
]


def nasty(rng, count):
    """Returns random strings of scripts, emoji, marks, controls, spaces, digits, code, contractions and
    special tokens."""
    def some(*ranges):
        return [chr(c) for a, b in ranges for c in range(a, b)]

    pools = [
        some((97, 123)), some((65, 91)), some((48, 58)), some((33, 48), (58, 65), (91, 97), (123, 127)), [" "], [" ", "  ", "   ", " " * 13],
        ["\n", "\r\n", "\t", "\r", "\n\n", " \n"], some((0, 32), (127, 160)), some((0xA0, 0x250)), some((0x300, 0x370)), some((0x370, 0x530)), some((0x530, 0x700)),
        some((0x900, 0xE00)), some((0xE00, 0x1200)), some((0x1E00, 0x2000)), some((0x2000, 0x2070)), some((0x2070, 0x2C00)), some((0x3000, 0x3130)),
        some((0x4E00, 0x9FFF)), some((0xAC00, 0xD7A4)), some((0x1100, 0x1200)), some((0xF900, 0xFB00)), some((0xFB00, 0x10000)), some((0x10000, 0x11000)),
        some((0x1D100, 0x1D200), (0x1D400, 0x1D800)), some((0x1F300, 0x1F700)) + ["\u200d", "\ufe0f", "\u200d"], some((0x2F800, 0x2FA1E)), some((0x660, 0x66A), (0x966, 0x970), (0xB2, 0xB4), (0x2150, 0x2189), (0x2460, 0x249C)),
        PROSE.split(), PROSE.split(), [" " + w for w in PROSE.split()], CODE.split("\n"), CODE.split(), TEXTS, MORE,
        "'s 't 're 've 'm 'll 'd 'S 'T 'RE 'Ve 'M 'LL 'D ' '\u017f \u2019s it's don't WE'RE".split(),
        "<|endoftext|> <s> </s> <mask> <unk> <pad> <|eot_id|> <|im_start|> <|im_end|> [INST] [/INST] <tool> <wide> quick >>TITLE<< <| |> <0x41>".split() + ["<tool use>"],
        "\u2581 \u2581\u2581 \u0120 \u010a".split(), [chr(c) for c in range(0x110000) if not 0xD800 <= c <= 0xDFFF],
    ]
    out = []
    for _ in range(count):
        kinds = rng.choices(pools, k=rng.randrange(1, 7))
        text = "".join(rng.choice(rng.choice(kinds)) for _ in range(rng.randrange(1, 40)))
        if rng.random() < 0.03:
            text += rng.choice(rng.choice(kinds)) * rng.randrange(20, 200)
        out.append(text[:3000])
    return out


def main():
    texts = list(dict.fromkeys(TEXTS + MORE + [t for t in nasty(random.Random(1), 150) if len(t) < 120]))
    short = list(dict.fromkeys(front_texts(random.Random(3), 430)))
    for make in pipelines():
        t, kind = make(), make.__name__
        folder = os.path.join(HERE, "bpe", kind)
        os.makedirs(folder, exist_ok=True)
        j = json.loads(t.to_str())
        with open(os.path.join(folder, "tokenizer.json"), "w", encoding="utf-8", newline="\n") as f:
            json.dump(j, f, ensure_ascii=False, separators=(",", ":"))
            f.write("\n")
        t, used = Tokenizer.from_file(os.path.join(folder, "tokenizer.json")), set()
        with open(os.path.join(folder, "cases.tsv"), "w", encoding="ascii", newline="\n") as f:
            more = PRECOMPILED if make in (big_bird, albert, t5) else []
            for text in short if make in FRONTS else texts + more:
                ids = t.encode(text).ids
                used |= set(ids)
                decoded = (t.decode(ids, skip_special_tokens=skip) for skip in (False, True))
                f.write("\t".join([escape(text), " ".join(map(str, ids)), *map(escape, decoded)]) + "\n")
        print(f"{kind}: {t.get_vocab_size()} tokens, {len(texts)} cases, {len(used)} tokens occur")
        if kind == "gpt2":
            folder = os.path.join(HERE, "bpe", "gpt2_files")
            os.makedirs(folder, exist_ok=True)
            t.model.save(folder)


if __name__ == "__main__":
    main()
