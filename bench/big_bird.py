#!/usr/bin/env python3
"""Measures a training step of BigBird-base on this machine: block-sparse attention against full attention,
and tinytrain against transformers, one step each in turn.

    python bench/big_bird.py                        2 layers, 1 x 4096 tokens, fp32
    python bench/big_bird.py --precision bf16-true

The C side is build/step --big-bird (bench/step.c; `make bench-programs`). On both sides: random weights and
tokens, no dropout, mean cross-entropy of two classes, AdamW, no clipping in transformers. Each of the four
programs is a process of its own, whose first step is not counted. Ratios are medians of the ratios within a
turn, so that other load on the machine matters less.

needs: torch, transformers."""
import argparse
import contextlib
import json
import os
import statistics
import sys
import time

from pytorch import PAIRS, Report, Turns, in_turn, peak_resident, positive, program, threads

HERE = os.path.abspath(__file__)
KINDS = ("block_sparse", "original_full")


def turns(args):
    """Runs a step for each line of standard input, as build/step --turns does."""
    torch = threads(args.threads)
    from transformers import BigBirdConfig, BigBirdForSequenceClassification, logging
    logging.set_verbosity_error()
    config = BigBirdConfig(num_hidden_layers=args.layers, num_labels=2, attention_type=args.kind,
                           hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    model = BigBirdForSequenceClassification(config).train()
    model = model.to(torch.bfloat16 if args.variant == "bf16 weights" else torch.float32)
    used = [p for n, p in model.named_parameters() if ".pooler." not in n]
    optimizer = torch.optim.AdamW(used, lr=1e-4, fused=True)
    ids = torch.randint(1, config.vocab_size, (args.seqs, args.length))
    labels = torch.arange(args.seqs) % 2
    for _ in sys.stdin:
        began = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        mixed = args.variant == "bf16 autocast"
        with torch.autocast("cpu", torch.bfloat16) if mixed else contextlib.nullcontext():
            loss = torch.nn.functional.cross_entropy(model(input_ids=ids).logits, labels)
        loss.backward()
        optimizer.step()
        loss.item()
        print(json.dumps({"name": "step", "value": time.perf_counter() - began, "unit": "s"}), flush=True)
    print(json.dumps({"name": "peak resident memory", "value": peak_resident() / 1e6, "unit": "MB"}))


def compare(args, report):
    sizes = ["--layers", str(args.layers), "--seqs", str(args.seqs), "--length", str(args.length),
             "--threads", str(args.threads)]
    ours = [Turns(f"tinytrain {kind}", [program(args, "step"), "--json", "--turns", "--big-bird", kind,
                                        "--recompute", args.recompute, "--precision", args.precision] + sizes)
            for kind in KINDS]
    theirs = [Turns(f"transformers {kind}", [sys.executable, HERE, "--turns", "--kind", kind, "--variant",
                                             PAIRS[args.precision]] + sizes)
              for kind in KINDS[:0 if args.alone else 2]]
    in_turn(ours + theirs, args.rounds)
    name = f"BigBird-base, {args.layers} layers, {args.seqs} x {args.length}, {args.precision}"
    for kind, a, b in zip(KINDS, ours, theirs or [None, None]):
        report.row(f"{name}, {kind}", statistics.median(a.seconds), "s", b and statistics.median(b.seconds))
        report.row(f"{name}, {kind}, memory", a.memory(), "MB", b and b.memory())
        report.row(f"{name}, {kind}, planned memory", a.rows["planned memory"]["value"], "MB")

    def ratio(what, a, b):
        report.row(f"{name}: {what}", statistics.median(x / y for x, y in zip(a.seconds, b.seconds)), "times")

    ratio("full / block-sparse", ours[1], ours[0])
    for kind, a, b in zip(KINDS, ours, theirs):
        ratio(f"transformers / tinytrain, {kind}", b, a)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0],
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=positive, default=len(os.sched_getaffinity(0)), metavar="N")
    parser.add_argument("--json", action="store_true", help="an object a line")
    parser.add_argument("--build", default="build", metavar="DIR", help="where build/step is (build)")
    parser.add_argument("--rounds", type=positive, default=5, metavar="N")
    parser.add_argument("--layers", type=positive, default=2, metavar="N")
    parser.add_argument("--seqs", type=positive, default=1, metavar="N")
    parser.add_argument("--length", type=positive, default=4096, metavar="N")
    parser.add_argument("--precision", choices=list(PAIRS), default="32-true")
    parser.add_argument("--recompute", default="cheap", metavar="R", help="of tinytrain (cheap)")
    parser.add_argument("--alone", action="store_true", help="without transformers")
    parser.add_argument("--turns", action="store_true", help="transformers' side")
    parser.add_argument("--kind", choices=KINDS, default=KINDS[0])
    parser.add_argument("--variant", default="fp32")
    args = parser.parse_args()
    if args.turns:
        turns(args)
    else:
        compare(args, Report(args.json))


if __name__ == "__main__":
    main()
