#!/usr/bin/env python3
"""Compares each head of each encoder with transformers, and embedders with sentence-transformers, in both
directions.

    python bench/check_heads.py [--only NAME] [--program build/logits] [--tolerance 1e-5]

For each kind of encoder and each head transformers saves a random checkpoint, and tinytrain computes the
logits of some sequences from the checkpoint and saves a copy. transformers then loads the copy, of which no
tensor may be missing or unused, and computes the logits again. For embedders, sentence-transformers does the
work of transformers. Prints, as a table, the largest difference of tinytrain's logits from the logits of the
checkpoint, and from the logits of the copy. The status is 1 if a difference exceeds the tolerance or if a
copy is not the checkpoint.

needs: torch, transformers, sentence-transformers."""
import argparse
import os
import shutil
import sys
import tempfile

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "tests", "golden"))
import make_golden
import make_heads
import numpy as np
import torch
import transformers
from check_logits import ours, sequences

# head -> (class, settings of the config)
HEADS = {
    "classes": ("ForSequenceClassification", dict(num_labels=3, problem_type="single_label_classification")),
    "labels": ("ForSequenceClassification", dict(num_labels=4, problem_type="multi_label_classification")),
    "scores": ("ForSequenceClassification", dict(num_labels=2, problem_type="regression")),
    "tags": ("ForTokenClassification", dict(num_labels=5)),
    "masked tokens": ("ForMaskedLM", dict()),
}


@torch.no_grad()
def logits_of(model, ids):
    return torch.cat([model(input_ids=torch.from_numpy(x)[None]).logits.flatten() for x in ids]).numpy()


@torch.no_grad()
def embeddings_of(model, ids):
    rows = [{"input_ids": torch.from_numpy(x)[None],
             "attention_mask": torch.ones(1, len(x), dtype=torch.long)} for x in ids]
    return torch.cat([model(x)["sentence_embedding"].flatten() for x in rows]).numpy()


def same(a, b, name):
    """Exits unless two models have equal tensors and equal settings of the head."""
    x, y = a.state_dict(), b.state_dict()
    if x.keys() != y.keys() or any(not torch.equal(x[k], y[k]) for k in x):
        sys.exit(f"{name}: the copy has other tensors")
    for key in "problem_type", "id2label", "label2id", "architectures":
        if getattr(a.config, key, None) != getattr(b.config, key, None):
            sys.exit(f"{name}: {key} is {getattr(b.config, key, None)}, was {getattr(a.config, key, None)}")


def head(name, kind, which, program, rng):
    suffix, settings = HEADS[which]
    class_name, config = make_heads.KINDS[kind]
    config = getattr(transformers, class_name + "Config")(**config, **settings)
    config._attn_implementation = "eager"
    cls = getattr(transformers, class_name + suffix)
    model = cls(config).eval()
    make_golden.initialise(model, rng)
    ids = sequences(rng, config)
    with tempfile.TemporaryDirectory() as folder:
        base, copy = os.path.join(folder, "base"), os.path.join(folder, "copy")
        model.save_pretrained(base)
        x = ours(program, base, ids, copy)
        again, info = cls.from_pretrained(copy, attn_implementation="eager", output_loading_info=True)
        if any(info.values()):
            sys.exit(f"{name}: {info}")
        same(model, again, name)
    return np.abs(x - logits_of(model, ids)).max(), np.abs(x - logits_of(again.eval(), ids)).max()


def embedder(name, kind, pooling, normalize, program, rng):
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer
    class_name, config = make_heads.KINDS[kind]
    config = getattr(transformers, class_name + "Config")(**config)
    config._attn_implementation = "eager"
    model = getattr(transformers, class_name + "Model")(config)
    make_golden.initialise(model, rng)
    ids = sequences(rng, config)
    with tempfile.TemporaryDirectory() as folder:
        base, first, copy = (os.path.join(folder, x) for x in ("base", "first", "copy"))
        model.save_pretrained(base)
        with open(os.path.join(base, "vocab.txt"), "w") as file:
            file.write("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\na\nb\n")
        transformers.BertTokenizerFast(os.path.join(base, "vocab.txt")).save_pretrained(base)
        modules = [Transformer(base), Pooling(12, pooling)] + [Normalize()] * normalize
        whole = SentenceTransformer(modules=modules, device="cpu").eval()
        whole.save(first)
        x = ours(program, first, ids, copy)
        for file in os.listdir(first):
            if file.startswith(("tokenizer", "vocab", "special")):
                shutil.copy(os.path.join(first, file), copy)
        again = SentenceTransformer(copy, device="cpu").eval()
        same(whole[0].auto_model, again[0].auto_model, name)
    return np.abs(x - embeddings_of(whole, ids)).max(), np.abs(x - embeddings_of(again, ids)).max()


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--only")
    p.add_argument("--program", default="build/logits")
    p.add_argument("--tolerance", type=float, default=1e-5)
    a = p.parse_args()
    if not os.access(a.program, os.X_OK):
        sys.exit(f"--program {a.program}: there is no such program; `make build/logits` builds one")
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    runs = {f"{kind}, {which}": (head, kind, which) for kind in make_heads.KINDS for which in HEADS}
    for k, kind in enumerate(make_heads.KINDS):
        pooling, normalize = ("mean", "cls")[k % 2], k // 2 % 2 == 0
        runs[f"{kind}, {pooling}{', length 1' if normalize else ''}"] = embedder, kind, pooling, normalize
    bad, compared = [], 0
    print("| random checkpoint | checkpoint | copy |\n| --- | --- | --- |")
    for k, (name, (check, *what)) in enumerate(runs.items()):
        if a.only and a.only not in name:
            continue
        compared += 1
        differences = check(name, *what, a.program, np.random.RandomState(k))
        print(f"| {name} | " + " | ".join(f"{x:.1e}" for x in differences) + " |", flush=True)
        if not max(differences) <= a.tolerance:
            bad.append(name)
    if not compared:
        sys.exit(f"--only {a.only}: no model is of this name")
    if bad:
        sys.exit("differs by more: " + ", ".join(bad))


if __name__ == "__main__":
    main()
