#!/usr/bin/env python3
"""Compares the tokenizers that tinytrain.h makes from a tokenizer.json with the tokenizers of Hugging Face,
for each kind of make_bpe.py and for kinds that are too large to be committed. Compares ids and decoded texts
of random strings, and of random bytes with Python's decoding with U+FFFD. Then compares many normalizers
before each of some splitters and a Metaspace that marks the first word, on a tenth of the strings and on
texts that begin with characters that normalizers change; and folders whose tokenizer_config.json names a
class that AutoTokenizer of transformers rebuilds.

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


def compare_class(ours, folder, texts, kind, name, model_type, options):
    """Returns how many ids or decoded texts differ from AutoTokenizer's."""
    os.mkdir(folder)
    shutil.copy(os.path.join(HERE, "bpe", kind, "tokenizer.json"), folder)
    for file, value in ("tokenizer_config", {"tokenizer_class": name, **options}), ("config", {"model_type": model_type}):
        with open(os.path.join(folder, file + ".json"), "w") as f:
            json.dump(value, f)
    theirs, k, differ = AutoTokenizer.from_pretrained(folder), ours.load(folder), 0
    for text in texts:
        ids = theirs(text.decode(errors="replace"))["input_ids"]
        same = ours.encode(k, text) == ids
        for skip in False, True:
            said = theirs.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
            same = same and ours.decode(k, ids, skip) == said.encode()
        differ += not same
    print(f"{kind} as {name} of {model_type}, {options}: {len(texts)} strings, {differ} differ", flush=True)
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
        for n, (kind, name, model_type) in enumerate(CLASSES):
            for m, options in enumerate(OPTIONS):
                prefix = options.get("add_prefix_space", "none")
                allowed = prefix is not None or name.startswith("Llama")
                # RobertaTokenizer keeps the file's own prefix
                if prefix == "none" and name == "RobertaTokenizer":
                    continue
                if a.only in (None, kind) and allowed:
                    wrong += compare_class(ours, os.path.join(folder, f"{n}.{m}"), texts[::10], kind, name, model_type, options)
    return wrong > 0


if __name__ == "__main__":
    sys.exit(main())
