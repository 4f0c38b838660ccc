#!/usr/bin/env python3
"""Compares the tokenizers that tinytrain.h makes from a tokenizer.json with those of Hugging Face, for each
kind of make_bpe.py, including the kinds that are too large to be committed. Compares
  - ids, offsets and decoded texts of random strings, and of random bytes, which Python decodes with U+FFFD;
  - ids and token types of pairs of strings, whole and cut to some lengths;
  - many normalizers, each before several splitters and before a Metaspace that marks the first word. The
    texts are a tenth of the strings, and texts that begin with characters that normalizers change;
  - folders whose tokenizer_config.json names a class that AutoTokenizer of transformers rebuilds.

    python tests/golden/compare_bpe.py [--strings N] [--seed N] [--only KIND]

needs: tokenizers, transformers, sentencepiece, protobuf; a C compiler ($CC). Run by hand: 10,000 strings take
about a minute.
"""
import argparse
import ctypes
import json
import os
import random
import shutil
import sys
import tempfile

from compare_tokens import Tinytrain
from make_bpe import HERE, front_texts, fronts, large, nasty, pipelines
from make_tokens import escape
from tokenizers import Tokenizer, __version__
from transformers import AutoTokenizer

CLASSES = [("gpt2", "GPT2Tokenizer", "gpt2"), ("roberta", "RobertaTokenizer", "roberta"), ("neox", "GPTNeoXTokenizer", "gpt_neox"),
           ("qwen2", "Qwen2Tokenizer", "qwen2"), ("roberta", "PreTrainedTokenizerFast", "roberta"), ("llama2", "LlamaTokenizer", "llama"),
           ("metaspace", "LlamaTokenizerFast", "llama"), ("llama3", "LlamaTokenizer", "llama"), ("llama2", "LlamaTokenizer", "mistral"),
           ("wordpiece", "BertTokenizer", "bert")]
OPTIONS = [{}, {"add_prefix_space": True}, {"add_prefix_space": False}, {"legacy": True}, {"legacy": False, "add_prefix_space": None}]


class Encoding(ctypes.Structure):
    """tt_encoding of tinytrain.h."""
    _fields_ = [("text", ctypes.c_char_p), ("bytes", ctypes.c_size_t), ("pair", ctypes.c_char_p), ("pair_bytes", ctypes.c_size_t),
                ("special", ctypes.c_bool), ("max_tokens", ctypes.c_int), ("room", ctypes.c_int64), ("ids", ctypes.c_void_p),
                ("types", ctypes.c_void_p), ("spans", ctypes.c_void_p)]


class BytePair(Tinytrain):
    def __init__(self, folder):
        super().__init__(folder)
        self.lib.tt_tokenizer_load.restype = ctypes.c_void_p
        self.lib.tt_tokenizer_encode.restype = self.lib.tt_tokenizer_decode.restype = ctypes.c_int64
        self.text = ctypes.create_string_buffer(1 << 20)
        self.types = (ctypes.c_int32 * len(self.ids))()
        self.spans = (ctypes.c_size_t * (2 * len(self.ids)))()

    def load(self, folder):
        k = self.lib.tt_tokenizer_load(self.context, folder.encode())
        if not k:
            sys.exit(self.lib.tt_error(self.context).decode())
        return ctypes.c_void_p(k)

    def encode(self, k, text):
        return self.encoding(k, text)[0]

    def encoding(self, k, text, pair=None, special=True, most=0):
        """Returns the ids and the token types of a text or a pair, cut to at most `most` ids, and the bytes
        [begin, end) that each id comes from."""
        e = Encoding(text, len(text), pair, len(pair or b""), special, most, len(self.ids), ctypes.addressof(self.ids),
                     ctypes.addressof(self.types), ctypes.addressof(self.spans))
        n = self.lib.tt_tokenizer_encode(k, ctypes.byref(e))
        return self.ids[:n], self.types[:n], list(zip(self.spans[:2 * n:2], self.spans[1:2 * n:2]))

    def decode(self, k, ids, skip):
        array = (ctypes.c_int32 * len(ids))(*ids)
        n = self.lib.tt_tokenizer_decode(k, array, ctypes.c_int64(len(ids)), ctypes.c_bool(skip), self.text,
                                         ctypes.c_size_t(len(self.text)))
        return self.text.raw[:n]


def spans_of(encoding, texts):
    """Converts the offsets in an encoding of Hugging Face from characters to bytes of UTF-8."""
    starts = []
    for text in texts:
        starts.append([0])
        for c in text:
            starts[-1].append(starts[-1][-1] + len(c.encode()))
    return [(starts[s or 0][a], starts[s or 0][b]) for (a, b), s in zip(encoding.offsets, encoding.sequence_ids)]


def compare_class(ours, folder, texts, kind, name, model_type, options):
    """Returns how many ids or decoded texts differ from AutoTokenizer's."""
    os.mkdir(folder)
    shutil.copy(os.path.join(HERE, "bpe", kind, "tokenizer.json"), folder)
    for file, value in ("tokenizer_config", {"tokenizer_class": name, **options}), ("config", {"model_type": model_type}):
        with open(os.path.join(folder, file + ".json"), "w") as f:
            json.dump(value, f)
    theirs, k, differ = AutoTokenizer.from_pretrained(folder), ours.load(folder), 0
    for text in texts:
        decoded = text.decode(errors="replace")
        e = theirs(decoded)
        ids = e["input_ids"]
        same = ours.encode(k, text) == ids and ours.encoding(k, decoded.encode())[2] == spans_of(e.encodings[0], [decoded])
        for skip in False, True:
            said = theirs.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
            same = same and ours.decode(k, ids, skip) == said.encode()
        differ += not same
    print(f"{kind} as {name} of {model_type}, {options}: {len(texts)} strings, {differ} differ", flush=True)
    return differ


def compare_pairs(ours, k, theirs, texts, name, rng):
    """Returns how many pairs of texts differ in their ids or token types."""
    differ = 0
    for a, b in zip(texts, texts[1:] + texts[:1]):
        most, special = rng.choice([0, 0, rng.randrange(4, 40)]), rng.random() < 0.8
        a, b = (x.decode(errors="replace") for x in (a, b))
        if most:
            theirs.enable_truncation(most)
        e = theirs.encode(a, b, add_special_tokens=special)
        theirs.no_truncation()
        found = ours.encoding(k, a.encode(), b.encode(), special, most)
        expected = e.ids, e.type_ids, spans_of(e, [a, b])
        if found != expected:
            differ += 1
            if differ < 4:
                print(f"{name}: {escape(a)} | {escape(b)} cut to {most}, special {special}: {found}, expected {expected}")
    print(f"{name}: {len(texts)} pairs, {differ} differ", flush=True)
    return differ


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strings", type=int, default=10000)
    parser.add_argument("--seed", type=int, default=2)
    parser.add_argument("--only", help="one kind, or what a kind's name begins with")
    a = parser.parse_args()
    rng = random.Random(a.seed)
    texts = [t.encode() for t in nasty(rng, a.strings)]
    texts += [bytes(rng.randrange(256) for _ in range(rng.randrange(1, 30))) for _ in range(a.strings // 10)]
    wrong = 0
    with tempfile.TemporaryDirectory() as folder:
        ours = BytePair(folder)
        print(f"tokenizers {__version__}", flush=True)
        kinds = {make.__name__: os.path.join(HERE, "bpe", make.__name__) for make in pipelines()}
        beginnings = [t.encode() for t in front_texts(rng, a.strings // 10)] + texts[::10]
        for name, tokenizer in ({**large(), **fronts()} if a.only not in kinds else {}).items():
            kinds[name] = os.path.join(folder, name.replace(" ", "_"))
            os.mkdir(kinds[name])
            tokenizer.save(os.path.join(kinds[name], "tokenizer.json"))
        for name, kind in kinds.items():
            if a.only and not name.startswith(a.only):
                continue
            differ, some = 0, beginnings if name.startswith("front") else texts
            theirs, k = Tokenizer.from_file(os.path.join(kind, "tokenizer.json")), ours.load(kind)
            for text in some:
                decoded = text.decode(errors="replace")
                e = theirs.encode(decoded)
                ids, spans = e.ids, spans_of(e, [decoded])
                found = ours.encoding(k, decoded.encode())
                same = ours.encode(k, text) == ids and found == (ids, e.type_ids, spans)
                for skip in False, True:
                    same = same and ours.decode(k, ids, skip) == theirs.decode(ids, skip).encode()
                if not same:
                    differ += 1
                    if differ < 4:
                        said = escape(text.decode(errors="replace"))
                        print(f"{name}: {said}: {ours.encode(k, text)}, {found}, expected {ids}, {spans}")
            print(f"{name}: {len(some)} strings, {differ} differ", flush=True)
            wrong += differ + compare_pairs(ours, k, theirs, some[::5], name, rng)
        for n, (kind, name, model_type) in enumerate(CLASSES):
            for m, options in enumerate(OPTIONS):
                prefix = options.get("add_prefix_space", "none")
                allowed = prefix is not None or name.startswith("Llama")
                # without the option, RobertaTokenizer takes add_prefix_space from tokenizer.json
                if prefix == "none" and name == "RobertaTokenizer":
                    continue
                if a.only in (None, kind) and allowed:
                    wrong += compare_class(ours, os.path.join(folder, f"{n}.{m}"), texts[::10], kind, name, model_type, options)
    return wrong > 0


if __name__ == "__main__":
    sys.exit(main())
