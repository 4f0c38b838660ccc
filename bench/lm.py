#!/usr/bin/env python3
"""tinytrain against PyTorch and llama.cpp on this machine: GPT-2 of 124 million parameters, the same random
weights and tokens, the same number of threads, in turn.

    python bench/lm.py train                    training steps on 4 x 256 tokens, losses and memory
    python bench/lm.py generate                 one sequence: tokens a second behind a prompt
    python bench/lm.py generate --llama FILE.gguf   ... and llama.cpp's, of weights of that shape in a file

The C side is build/lm (bench/lm.c; `make bench-programs`). Training on both sides: mean cross-entropy of the
next token, AdamW (PyTorch: fused) 1e-4, decay 0.01 except on biases and norms, no clipping, no dropout;
PyTorch attends by scaled_dot_product_attention. Programs run one step each in turn, after one that is not
counted; each is a process of its own. Precisions stand side by side as in pytorch.py. transformers generates
with its cache, without sampling. The file for --llama is made of the folder that --keep leaves, by
llama.cpp's convert_hf_to_gguf.py (--outtype f32 or f16).

needs: torch, transformers, numpy; for --llama the package llama-cpp-python."""
import argparse
import contextlib
import json
import os
import shutil
import statistics
import sys
import tempfile
import time

from pytorch import (PAIRS, Report, Turns, in_turn, output_of, peak_resident, positive, program, rows_of,
                     threads)

HERE = os.path.abspath(__file__)


def make(folder, args):
    """GPT-2 with random weights, and tokens for each step"""
    import numpy as np
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel
    torch.manual_seed(1)
    config = GPT2Config(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    config.n_layer = args.layers or config.n_layer
    GPT2LMHeadModel(config).save_pretrained(folder)
    count = args.steps_at_most * args.seqs * args.length + 1
    ids = np.random.RandomState(1).zipf(1.3, count) % config.vocab_size
    ids.astype(np.uint16).tofile(os.path.join(folder, "ids.bin"))


def turns(args):
    """a step for each line of standard input, as build/lm --turns"""
    torch = threads(args.threads)
    import numpy as np
    from transformers import GPT2LMHeadModel
    model = GPT2LMHeadModel.from_pretrained(args.folder, attn_implementation="sdpa").train()
    model = model.to(torch.bfloat16 if args.variant == "bf16 weights" else torch.float32)
    groups = [{"params": [p for p in model.parameters() if p.ndim >= 2], "weight_decay": 0.01},
              {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-4, fused=True)
    ids = torch.from_numpy(np.fromfile(os.path.join(args.folder, "ids.bin"), np.uint16).astype(np.int64))
    tokens, k = args.seqs * args.length, 0
    for _ in sys.stdin:
        x, y = (ids[k * tokens + n:(k + 1) * tokens + n].view(args.seqs, args.length) for n in (0, 1))
        k = (k + 1) % args.steps_at_most
        began = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        mixed = args.variant == "bf16 autocast"
        with torch.autocast("cpu", torch.bfloat16) if mixed else contextlib.nullcontext():
            logits = model(input_ids=x).logits
            loss = torch.nn.functional.cross_entropy(logits.view(tokens, -1), y.reshape(tokens))
        loss.backward()
        optimizer.step()
        loss = loss.item()
        print(json.dumps({"name": "step", "value": time.perf_counter() - began, "unit": "s", "loss": loss}),
              flush=True)
    print(json.dumps({"name": "peak resident memory", "value": peak_resident() / 1e6, "unit": "MB"}))


class Steps(Turns):
    """Turns that keep the losses."""

    def __init__(self, label, command):
        super().__init__(label, command)
        self.losses, read = [], self.process.stdout

        def lines():
            for line in read:
                if '"loss"' in line:
                    self.losses.append(json.loads(line)["loss"])
                yield line
        self.lines = lines()

    def turn(self, count=True):
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        for line in self.lines:
            row = json.loads(line) if line.startswith("{") else {}
            if row.get("name") == "step":
                if count:
                    self.seconds.append(row["value"])
                return
        sys.exit(f"lm.py: {self.label} ended with status {self.process.wait()}")

    def finish(self):
        self.process.stdin.close()
        self.rows = rows_of("".join(self.lines))
        if self.process.wait() != 0:
            sys.exit(f"lm.py: {self.label} ended with status {self.process.returncode}")


def train(args, report):
    with tempfile.TemporaryDirectory() as folder:
        make(folder, args)
        sizes = ["--seqs", str(args.seqs), "--length", str(args.length), "--threads", str(args.threads)]
        tokens = args.seqs * args.length
        for precision in args.precisions:
            ours = Steps(f"tinytrain {precision}",
                         [program(args, "lm"), "--json", "--turns", "--model", folder, "--data",
                          os.path.join(folder, "ids.bin"), "--precision", precision] + sizes)
            theirs = Steps(f"PyTorch {PAIRS[precision]}",
                           [sys.executable, HERE, "turns", "--variant", PAIRS[precision], "--folder", folder,
                            "--steps-at-most", str(args.steps_at_most)] + sizes)
            in_turn([ours, theirs], args.rounds)
            a, b = (tokens / statistics.median(p.seconds) for p in (ours, theirs))
            apart = max(abs(x - y) / y for x, y in zip(ours.losses, theirs.losses))
            name = f"GPT-2, {args.seqs} x {args.length}, {precision}"
            report.say(f"{name}: {len(ours.losses)} steps, loss {ours.losses[0]:.4f} to "
                       f"{ours.losses[-1]:.4f}")
            report.row(f"{name}, PyTorch {PAIRS[precision]}", a, "tokens/s", b)
            report.row(f"{name}, memory", ours.memory(), "MB", theirs.memory())
            report.row(f"{name}, planned memory", ours.rows["planned memory"]["value"], "MB")
            report.row(f"{name}, largest difference of a loss", apart, "relative")


def theirs_generates(args, folder):
    """transformers' tokens a second, after the first, best of two"""
    torch = threads(args.threads)
    import numpy as np
    from transformers import GPT2LMHeadModel
    dtype = torch.bfloat16 if args.precision == "bf16-true" else torch.float32
    model = GPT2LMHeadModel.from_pretrained(folder, attn_implementation="sdpa", dtype=dtype).eval()
    ids = np.fromfile(os.path.join(folder, "ids.bin"), np.uint16)[:args.prompt].astype(np.int64)
    prompt = torch.from_numpy(ids)[None]

    def seconds(tokens):
        began = time.perf_counter()
        out = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=tokens,
                             min_new_tokens=tokens, do_sample=False, pad_token_id=0)
        assert out.shape[1] == args.prompt + tokens
        return time.perf_counter() - began
    with torch.no_grad():
        seconds(2)
        return max((args.tokens - 1) / (seconds(args.tokens) - seconds(1)) for _ in range(2))


def llama_generates(args):
    """llama.cpp's tokens a second, after the first, best of two"""
    from llama_cpp import Llama
    model = Llama(args.llama, n_ctx=args.prompt + args.tokens + 8, n_threads=args.threads,
                  n_threads_batch=args.threads, verbose=False)

    def speed():
        model.reset()
        model.eval(list(range(1, args.prompt + 1)))
        began = time.perf_counter()
        for _ in range(args.tokens):
            model.eval([model.sample(temp=0.0)])
        return args.tokens / (time.perf_counter() - began)
    speed()
    return max(speed() for _ in range(2))


def generate(args, report):
    with tempfile.TemporaryDirectory() as folder:
        make(folder, args)
        command = [program(args, "lm"), "--json", "--model", folder,
                   "--data", os.path.join(folder, "ids.bin"), "--generate", str(args.tokens),
                   "--prompt", str(args.prompt), "--threads", str(args.threads),
                   "--precision", args.precision]
        ours, theirs, llama = 0, 0, 0
        for _ in range(args.rounds):        # in turn; the best of each
            ours = max(ours, rows_of(output_of(command))["tokens a second, after the first"]["value"])
            theirs = max(theirs, theirs_generates(args, folder))
            llama = max(llama, llama_generates(args)) if args.llama else 0
        name = f"GPT-2, {args.tokens} tokens behind {args.prompt}, {args.precision}"
        report.row(f"{name}, transformers", ours, "tokens/s", theirs)
        if args.llama:
            report.row(f"{name}, {os.path.basename(args.llama)}", ours, "tokens/s", llama, who="llama.cpp")
        if args.keep:
            shutil.copytree(folder, args.keep)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0],
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    subs = parser.add_subparsers(dest="task", required=True)
    for name, about in (("train", "training steps"), ("generate", "tokens a second"),
                        ("turns", "PyTorch's side")):
        s = subs.add_parser(name, help=about)
        s.add_argument("--threads", type=positive, default=len(os.sched_getaffinity(0)), metavar="N")
        s.add_argument("--json", action="store_true", help="an object a line")
        s.add_argument("--build", default="build", metavar="DIR", help="where build/lm is (build)")
        s.add_argument("--rounds", type=positive, default=5 if name == "train" else 2, metavar="N")
        s.add_argument("--layers", type=positive, metavar="N", help="of the model, if not 12")
        s.add_argument("--seqs", type=positive, default=4, metavar="N")
        s.add_argument("--length", type=positive, default=256, metavar="N")
        s.add_argument("--steps-at-most", type=positive, default=64, metavar="N", help="that differ (64)")
    subs.choices["train"].add_argument("--precisions", nargs="+", choices=list(PAIRS),
                                       default=["32-true", "bf16-mixed"])
    g = subs.choices["generate"]
    g.add_argument("--precision", choices=["32-true", "bf16-true"], default="32-true")
    g.add_argument("--tokens", type=positive, default=128, metavar="N")
    g.add_argument("--prompt", type=positive, default=16, metavar="N")
    g.add_argument("--llama", metavar="FILE.gguf", help="the same weights for llama.cpp")
    g.add_argument("--keep", metavar="DIR", help="leave the model's folder there")
    subs.choices["turns"].add_argument("--variant", required=True)
    subs.choices["turns"].add_argument("--folder", required=True)
    args = parser.parse_args()
    report = Report(args.json)
    {"train": train, "generate": generate}.get(args.task, lambda a, _: turns(a))(args, report)


if __name__ == "__main__":
    main()
