#!/usr/bin/env python3
"""Checks that transformers computes the same logits as tinytrain from a folder that tinytrain saved.

    python bench/check_export.py FOLDER TEXTS [--program build/logits] [--count 100] [--tolerance 1e-4]

TEXTS: a file with a text on each line, or a folder of .txt files (the first COUNT by name). transformers'
Auto classes load the tokenizer and the model from FOLDER. Prints the largest difference. The status is 1 if
the difference exceeds the tolerance.

needs: torch, transformers."""
import argparse
import os
import subprocess
import sys

os.environ.setdefault("HF_HUB_OFFLINE", "1")
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("folder")
    p.add_argument("texts")
    p.add_argument("--program", default="build/logits")
    p.add_argument("--count", type=int, default=100)
    p.add_argument("--tolerance", type=float, default=1e-4)
    args = p.parse_args()
    if os.path.isdir(args.texts):
        names = sorted(n for n in os.listdir(args.texts) if n.endswith(".txt"))[:args.count]
        texts = [open(os.path.join(args.texts, n), encoding="utf-8").read() for n in names]
    else:
        texts = open(args.texts, encoding="utf-8").read().splitlines()[:args.count]
    texts = [" ".join(t.split()) for t in texts]      # puts each text on one line
    tokenizer = AutoTokenizer.from_pretrained(args.folder)
    model = AutoModelForSequenceClassification.from_pretrained(args.folder, dtype=torch.float32).eval()
    out = subprocess.run([args.program, args.folder], input="\n".join(texts) + "\n", capture_output=True,
                         text=True, check=True).stdout
    ours = torch.tensor([[float(x) for x in line.split("\t")] for line in out.splitlines()])
    limit = min(512, model.config.max_position_embeddings)
    with torch.no_grad():
        theirs = torch.cat(
            [model(**tokenizer(t, truncation=True, max_length=limit, return_tensors="pt")).logits
             for t in texts])
    if ours.shape != theirs.shape:
        sys.exit(f"{tuple(ours.shape)} logits of tinytrain, {tuple(theirs.shape)} of transformers")
    worst = (ours - theirs).abs().max().item()
    print(f"{len(texts)} texts, {ours.shape[1]} classes: largest difference {worst:.3g}, "
          f"logits up to {theirs.abs().max().item():.3g}; "
          f"labels {model.config.id2label}")
    if not worst <= args.tolerance:
        sys.exit(f"more than {args.tolerance}")


if __name__ == "__main__":
    main()
