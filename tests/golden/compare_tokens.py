#!/usr/bin/env python3
"""Compares the ids of tinytrain.h's tokenizer with those of transformers' BertTokenizer, cased and uncased:

  - every code point except surrogates: alone, between letters, and before, between and after combining marks;
  - random strings of letters, marks, Chinese, Hangul, controls, spaces, punctuation, special tokens;
  - random bytes, most of which are not UTF-8: for transformers, Python replaces invalid bytes by U+FFFD;
  - vocab.txt files with lines that end in all kinds of white space.

    python tests/golden/compare_tokens.py [--strings N] [--seed N] [--step N]

needs: transformers 5, tokenizers; a C compiler ($CC). Run by hand, since it takes minutes. --step N takes
each Nth code point only. The vocabulary has the tokens of vocab_{cased,uncased}.txt, and each code point
below U+32000 twice: as a word and as a piece that continues a word. So the ids tell which characters a word
has.
"""
import argparse
import ctypes
import functools
import logging
import os
import random
import subprocess
import sys
import tempfile

os.environ.setdefault("HF_HUB_OFFLINE", "1")
import tokenizers
import transformers
from make_tokens import SPECIALS, bert_tokenizer, escape, nasty_strings
from make_unicode import ALL

HERE = os.path.dirname(os.path.abspath(__file__))
POINTS = 0x32000


class Tinytrain:
    """Calls the tokenizer of tinytrain.h, compiled to a shared library in `folder`."""

    def __init__(self, folder):
        path = os.path.join(folder, "tinytrain.so")
        header = os.path.join(HERE, "..", "..", "tinytrain.h")
        flags = "-O1 -fPIC -shared -DTINYTRAIN_IMPLEMENTATION -x c".split()
        command = [os.environ.get("CC", "cc"), *flags, header, "-o", path, "-lm", "-lpthread"]
        subprocess.run(command, check=True)
        self.lib = ctypes.CDLL(path)
        for name in ("tt_open", "tt_tokenizer_open"):
            getattr(self.lib, name).restype = ctypes.c_void_p
        for name in ("tt_error", "tt_tokenizer_token"):
            getattr(self.lib, name).restype = ctypes.c_char_p
        self.context = ctypes.c_void_p(self.lib.tt_open(None))
        self.ids = (ctypes.c_int32 * 10000)()

    def open(self, path, lowercase):
        k = self.lib.tt_tokenizer_open(self.context, path.encode(), ctypes.c_bool(lowercase))
        if not k:
            sys.exit(self.lib.tt_error(self.context).decode())
        return ctypes.c_void_p(k)

    def tokenize(self, k, text):
        return self.ids[:self.lib.tt_tokenize(k, text, ctypes.c_size_t(len(text)), self.ids, len(self.ids))]

    def tokens(self, k):
        return [self.lib.tt_tokenizer_token(k, i) for i in range(self.lib.tt_tokenizer_size(k))]


def write_vocabulary(path, kind):
    """Returns {token: id}. White space and NUL cannot be tokens."""
    with open(os.path.join(HERE, f"vocab_{kind}.txt"), encoding="utf-8") as f:
        tokens = f.read().splitlines()
    points = [chr(c) for c in ALL if 0 < c < POINTS and not chr(c).isspace()]
    tokens += points + ["##" + c for c in points]
    tokens = list(dict.fromkeys(tokens))
    with open(path, "w", encoding="utf-8", newline="\n") as f:
        f.write("".join(t + "\n" for t in tokens))
    return {t: i for i, t in enumerate(tokens)}


def compare(what, mine, theirs, texts, show=5):
    """Compares the ids of texts, which are strings or bytes. Prints how many texts have other ids, and the
    first of these texts. Returns how many texts have other ids."""
    differ = 0
    for begin in range(0, len(texts), 10000):
        chunk = texts[begin:begin + 10000]
        strings = [t.decode("utf-8", "replace") if isinstance(t, bytes) else t for t in chunk]
        for text, want in zip(chunk, theirs(strings)["input_ids"]):
            have = mine(text if isinstance(text, bytes) else text.encode())
            if have != want:
                differ += 1
                if differ <= show:
                    name = text if isinstance(text, bytes) else escape(text)
                    print(f"    {name!r}: {have}, expected {want}")
    print(f"{what}: {len(texts)} compared, {differ} differ", flush=True)
    return differ


def random_bytes(rng):
    cuts = []
    for _ in range(rng.randrange(1, 12)):
        c = chr(rng.randrange(*rng.choice(((0, 0x80), (0x80, 0x800), (0x800, 0xD800), (0x10000, 0x110000)))))
        cut, noise = c.encode()[:rng.randrange(1, 5)], bytes(rng.choices(range(256), k=rng.randrange(1, 4)))
        cuts.append(rng.choice((cut, noise)) + b"a" * rng.randrange(2))
    return b"".join(cuts)


def compare_files(tinytrain, folder):
    """Compares the tokens of vocab.txt files with the tokens that `tokenizers` and transformers read."""
    path = os.path.join(folder, "vocab.txt")
    differ = files = 0
    spaces = ["", "\r", "\r\r", "\r\r\r\r", " ", "\t\r", "\v\f", "\x1c", "\u0085\u2028", "\u00a0", "\u3000\r"]
    spaces += ["\u200b", "\u00e9"]  # characters that are no white space
    tokens = ["a", " b", "", "c\rd", "##", "## ", "##a", "\u4e2d"]
    for end in [s + "\n" for s in spaces]:
        for last in (end, "", "\r", "\n"):
            with open(path, "w", encoding="utf-8", newline="") as f:
                f.write("\n".join(SPECIALS) + "\n" + end.join(tokens) + last)
            vocabulary = tokenizers.models.WordPiece.read_file(path)
            loaded = transformers.BertTokenizer.from_pretrained(folder).get_vocab()
            k = tinytrain.open(path, True)
            mine = {t.decode(): i for i, t in enumerate(tinytrain.tokens(k))}
            tinytrain.lib.tt_tokenizer_free(k)
            files += 1
            if mine != vocabulary or loaded != vocabulary:
                differ += 1
                print(f"    lines ending in {end!r}, the last in {last!r}: {mine}, expected {vocabulary}")
    print(f"vocab.txt: {files} files compared, {differ} differ", flush=True)
    return differ


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--strings", type=int, default=150000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--step", type=int, default=1)
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    print(f"transformers {transformers.__version__}, tokenizers {tokenizers.__version__}")
    differ = 0
    with tempfile.TemporaryDirectory() as folder:
        tinytrain = Tinytrain(folder)
        differ += compare_files(tinytrain, folder)
        for kind in ("cased", "uncased"):
            path = os.path.join(folder, f"{kind}.txt")
            theirs = bert_tokenizer(write_vocabulary(path, kind), kind == "uncased")
            k = tinytrain.open(path, kind == "uncased")
            mine = functools.partial(tinytrain.tokenize, k)
            for around in ("{}", "a{}b", "a{}\u0301", "a\U0001d16d{}\U0001d165b",
                           "\u0345{}\u302e\u0334[SEP]{}"):
                texts = [around.replace("{}", chr(c)) for c in ALL[::args.step]]
                differ += compare(f"{kind}, code points in {escape(around)}", mine, theirs, texts)
            rng = random.Random(args.seed)
            differ += compare(f"{kind}, random strings", mine, theirs, nasty_strings(rng, args.strings))
            texts = [random_bytes(rng) for _ in range(args.strings)]
            differ += compare(f"{kind}, random bytes", mine, theirs, texts)
            tinytrain.lib.tt_tokenizer_free(k)
        tinytrain.lib.tt_close(tinytrain.context)
    sys.exit(f"{differ} differ" if differ else 0)


if __name__ == "__main__":
    main()
