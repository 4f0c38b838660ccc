#!/usr/bin/env python3
"""Compares the tokenizers that tinytrain.h makes of a tokenizer.json with those of Hugging Face, for each kind of
make_bpe.py, also those that are too large to be committed: ids and decoded texts of random strings, and of
random bytes beside Python's decoding with U+FFFD; and for each of many normalizers before each of some
splitters and a Metaspace that marks the first word, of a tenth of the strings and of texts that begin with
what normalizers change.

    python tests/golden/compare_bpe.py [--strings N] [--seed N] [--only KIND]

needs: tokenizers, transformers, sentencepiece, protobuf; a C compiler ($CC). It is run by hand: 10,000
strings take about a minute.
"""
import argparse
import ctypes
import os
import random
import sys
import tempfile

from compare_tokens import Tinytrain
from make_bpe import HERE, front_texts, fronts, large, nasty, pipelines
from make_tokens import escape
from tokenizers import Tokenizer, __version__


class BytePair(Tinytrain):
    def __init__(self, folder):
        super().__init__(folder)
        self.lib.tt_tokenizer_load.restype = ctypes.c_void_p
        self.lib.tt_tokenizer_encode.restype = self.lib.tt_tokenizer_decode.restype = ctypes.c_int64
        self.text = ctypes.create_string_buffer(1 << 20)

    def load(self, folder):
        k = self.lib.tt_tokenizer_load(self.context, folder.encode())
        if not k:
            sys.exit(self.lib.tt_error(self.context).decode())
        return ctypes.c_void_p(k)

    def encode(self, k, text):
        n = self.lib.tt_tokenizer_encode(k, text, ctypes.c_size_t(len(text)), ctypes.c_bool(True), self.ids,
                                         ctypes.c_int64(len(self.ids)))
        return self.ids[:n]

    def decode(self, k, ids, skip):
        array = (ctypes.c_int32 * len(ids))(*ids)
        n = self.lib.tt_tokenizer_decode(k, array, ctypes.c_int64(len(ids)), ctypes.c_bool(skip), self.text,
                                         ctypes.c_size_t(len(self.text)))
        return self.text.raw[:n]


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
                ids = theirs.encode(text.decode(errors="replace")).ids
                same = ours.encode(k, text) == ids
                for skip in False, True:
                    same = same and ours.decode(k, ids, skip) == theirs.decode(ids, skip).encode()
                if not same:
                    differ += 1
                    if differ < 4:
                        said = escape(text.decode(errors="replace"))
                        print(f"{name}: {said}: {ours.encode(k, text)}, "
                              f"expected {ids}")
            print(f"{name}: {len(some)} strings, {differ} differ", flush=True)
            wrong += differ
    return wrong > 0


if __name__ == "__main__":
    sys.exit(main())
