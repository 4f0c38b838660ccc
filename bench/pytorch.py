#!/usr/bin/env python3
"""Compares tinytrain with PyTorch on this machine: the same model, tokens, optimizer, dropout and number of
threads, in turn.

    python bench/pytorch.py gemm
        F.linear of the shapes in bench/gemm.c: forward, dX, dW; also OpenBLAS and oneDNN
    python bench/pytorch.py step
        training steps of DistilBERT-base on 8 x 256 tokens
    python bench/pytorch.py step --vit L/16 --seqs 4
        training steps of a vision transformer on images
    python bench/pytorch.py imdb --imdb aclImdb --vocab DIR
        training steps on batches of 16 reviews: PyTorch pads them, tinytrain does not
    python bench/pytorch.py epoch --imdb aclImdb --start DIR
        one epoch of MiniLM, from process start to end

DIR: a Hugging Face folder with vocab.txt; for `epoch` a folder that bench/minilm_imdb.py --make-start writes.
`make bench-programs` builds the C side: build/gemm, build/step and build/distilbert_imdb, and
build/gemm_openblas and build/gemm_onednn (bench/peers/gemm.c) if those libraries are installed. PyTorch's
products are MKL's in fp32 and oneDNN's in bf16, if PyTorch is built with them. With --json each figure is an
object on a line of its own: name, value, unit, peak, of_peak, peer (PyTorch's value; in `gemm` the value of
the fastest library, unless the name says which), ratio (ours / theirs). A key is null where it does not
apply.

Training on both sides: random weights, mean cross-entropy, AdamW (PyTorch: fused) 5e-5, decay 0.01 except on
biases and norms, gradient norm clipped to 1, dropout as in DistilBERT's config (0.1; 0.2 before the
classifier). PyTorch attends by scaled_dot_product_attention. In `step` and `imdb` the programs run one step
each in turn, A B A B ..., after a step that is not counted; every PyTorch variant is a process of its own.
Precisions are paired as follows: 32-true with fp32; bf16-mixed with autocast to bf16; bf16-true with weights
in bf16.

needs: torch, transformers, safetensors. On a GPU: bench/gpu.sh."""
import argparse
import array
import contextlib
import itertools
import json
import multiprocessing
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time

# torch and transformers are imported where they are used, so that this process stays small. The ru_maxrss of
# a child process starts from the ru_maxrss of its parent, even after an exec.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
PAIRS = {"32-true": "fp32", "bf16-mixed": "bf16 autocast", "bf16-true": "bf16 weights"}
GEMMS = [(rows, n, m) for rows, d, ff in ((512, 768, 3072), (1536, 768, 3072), (6144, 768, 3072),
                                          (788, 1024, 4096), (3152, 1024, 4096))
         for n, m in ((d, d), (d, ff), (ff, d))]


# ------------------------------------------------------------------------------------------------ reporting
class Report:
    def __init__(self, as_json):
        self.json = as_json

    def say(self, text):
        print(text, file=sys.stderr if self.json else sys.stdout, flush=True)

    def row(self, name, value, unit, peer=None, peak=None, who="PyTorch"):
        """Prints a value of tinytrain, beside a peer's value if `peer` is given."""
        ratio = value / peer if peer else None
        if self.json:
            print(json.dumps({"name": name, "value": value, "unit": unit, "peak": peak,
                              "of_peak": value / peak if peak else None, "peer": peer, "ratio": ratio}),
                  flush=True)
            return
        of_peak = f"{100 * value / peak:5.1f}% of {peak:.4g}" if peak else ""
        print(f"{name:<60} {value:10.4g} {unit:<8} {of_peak:<16}" +
              (f" {peer:10.4g} {who:<8} ratio {ratio:.2f}" if peer else ""), flush=True)


def program(args, name):
    path = os.path.join(args.build, name)
    if not os.access(path, os.X_OK):
        sys.exit(f"pytorch.py: {path} is not there: "
                 "make bench-programs builds it (--build names another folder)")
    return path


def output_of(command):
    out = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if out.returncode:
        sys.exit(f"pytorch.py: '{' '.join(command)}' ended with status {out.returncode}")
    return out.stdout


def rows_of(text):
    """Returns the JSON objects among the lines that a program printed, as {name: object}."""
    return {r["name"]: r for r in (json.loads(line) for line in text.splitlines() if line.startswith("{"))}


class Turns:
    """A program that does a training step for each line that it reads, and prints how long the step took."""

    def __init__(self, label, command):
        self.label, self.seconds, self.rows = label, [], {}
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def turn(self, count=True):
        try:
            self.process.stdin.write("\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass
        for line in self.process.stdout:
            row = json.loads(line) if line.startswith("{") else {}
            if row.get("name") == "step":
                if count:
                    self.seconds.append(row["value"])
                return
        sys.exit(f"pytorch.py: {self.label} ended with status {self.process.wait()}")

    def finish(self):
        self.process.stdin.close()
        self.rows = rows_of(self.process.stdout.read())
        if self.process.wait() != 0:
            sys.exit(f"pytorch.py: {self.label} ended with status {self.process.returncode}")

    def memory(self):
        return self.rows["peak resident memory"]["value"]


def model_options(args):
    vit = ["--vit", args.vit, "--pixels", str(args.pixels)] if getattr(args, "vit", None) else []
    return ["--threads", str(args.threads)] + vit + (["--layers", str(args.layers)] if args.layers else [])


def ours(args, precision, batches):
    return Turns(f"tinytrain {precision}",
                 [program(args, "step"), "--json", "--turns", "--precision", precision, "--batches",
                  batches] + model_options(args))


def theirs(args, variant, batches):
    return Turns(f"PyTorch {variant}",
                 [sys.executable, os.path.abspath(__file__), "turns", "--variant", variant, "--batches",
                  batches] + model_options(args))


def in_turn(programs, rounds, warm=1):
    for _ in range(warm):
        for p in programs:
            p.turn(count=False)
    for _ in range(rounds):
        for p in programs:
            p.turn()
    for p in programs:
        p.finish()


# --------------------------------------------------------------------------------------------- PyTorch's side
def threads(n):
    import torch
    torch.set_num_threads(n)
    return torch


# size of a ViT: (width, layers, heads)
VITS = {"Ti": (192, 12, 3), "S": (384, 12, 6), "B": (768, 12, 12), "L": (1024, 24, 16), "H": (1280, 32, 16)}


def attention_of(args):
    """Returns the name under which a model of transformers finds scaled_dot_product_attention. Under
    torch.compile transformers makes a mask for "sdpa" even if no sequence is padded, and with that mask
    PyTorch multiplies in fp32. --whole registers the function under another name, for which transformers
    makes no mask."""
    if not getattr(args, "whole", False):
        return "sdpa"
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    AttentionInterface.register("whole", sdpa_attention_forward)
    return "whole"


def model_of(args):
    """Returns the model in PyTorch, with random weights."""
    if getattr(args, "nano", None):
        from nano_gpt import NanoGPT
        return NanoGPT(args.nano, layers=args.layers or 12, dropout=args.dropout)
    if getattr(args, "gpt2", False):
        from transformers import GPT2Config, GPT2LMHeadModel
        return GPT2LMHeadModel(GPT2Config(n_layer=args.layers or 12, attn_implementation=attention_of(args)))
    if not args.vit:
        from transformers import DistilBertConfig, DistilBertForSequenceClassification
        return DistilBertForSequenceClassification(
            DistilBertConfig(n_layers=args.layers or 6, num_labels=2, attn_implementation=attention_of(args)))
    from transformers import ViTConfig, ViTForImageClassification
    size, patch = args.vit.split("/")
    width, layers, heads = VITS[size]
    return ViTForImageClassification(ViTConfig(hidden_size=width, num_hidden_layers=args.layers or layers,
                                               num_attention_heads=heads, intermediate_size=4 * width,
                                               image_size=args.pixels, patch_size=int(patch), num_labels=2,
                                               attn_implementation=attention_of(args)))


def inputs_of(tensors, b, args, dtype):
    """Returns the model's inputs and the labels of one batch of a file. Normalises images outside of the
    timed step."""
    import torch
    labels = tensors[b + "labels"].long()
    if args.vit:
        pixels = tensors[b + "pixels"].permute(0, 3, 1, 2).contiguous().float()
        return {"pixel_values": ((pixels / 255 - 0.5) / 0.5).to(dtype)}, labels
    start = tensors[b + "seq_start"].tolist()
    lengths = [j - i for i, j in zip(start, start[1:])]
    ids = torch.nn.utils.rnn.pad_sequence(list(tensors[b + "input_ids"].long().split(lengths)),
                                          batch_first=True)
    mask = ((torch.arange(ids.shape[1]) < torch.tensor(lengths)[:, None]).long() if len(set(lengths)) > 1
            else None)
    return {"input_ids": ids, "attention_mask": mask}, labels


def training(args, device="cpu", before_device=lambda: None):
    """Returns a function, and the batches of a file. The function does a training step of one variant on a
    batch, and returns the loss. Calls before_device() before the first use of the device."""
    torch = threads(args.threads)
    from safetensors.torch import load_file
    torch.manual_seed(1)
    kind, _, compiled = args.variant.partition(" compiled")
    model = model_of(args)
    before_device()
    model = model.to(device, torch.bfloat16 if kind == "bf16 weights" else torch.float32).train()
    plain = [p for p in model.parameters() if p.ndim < 2]
    decayed = [p for p in model.parameters() if p.ndim >= 2]
    optimizer = torch.optim.AdamW([{"params": decayed, "weight_decay": 0.01},
                                   {"params": plain, "weight_decay": 0.0}], lr=5e-5, fused=True)
    mode = compiled.replace(" with ", "") or None      # the mode of torch.compile
    forward = (torch.compile(model, mode=mode, dynamic=True if getattr(args, "dynamic", False) else None)
               if "compiled" in args.variant else model)
    next_tokens, nano = getattr(args, "gpt2", False), getattr(args, "nano", None)
    tensors, batches = load_file(args.batches), []
    while f"batch{len(batches)}.labels" in tensors:
        inputs, labels = inputs_of(tensors, f"batch{len(batches)}.", args, next(model.parameters()).dtype)
        if nano:      # each token predicts the next
            labels = torch.nn.functional.pad(inputs["input_ids"][:, 1:], (0, 1), value=-100)
        batches.append(({name: x if x is None else x.to(device) for name, x in inputs.items()},
                        labels.to(device)))

    def step(inputs, labels):
        if mode:
            torch.compiler.cudagraph_mark_step_begin()
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device, torch.bfloat16) if kind == "bf16 autocast" else contextlib.nullcontext():
            if nano:
                loss = forward(inputs["input_ids"], labels)
            else:
                logits = forward(**inputs).logits
                if next_tokens:
                    logits, labels = logits[:, :-1].flatten(0, 1), inputs["input_ids"][:, 1:].flatten()
                loss = torch.nn.functional.cross_entropy(logits, labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss
    return step, batches


def peak_resident():
    """Returns the peak resident memory in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def turns(args):
    """Runs a step for each line of standard input, as build/step --turns does."""
    step, batches = training(args)
    k = len(batches) - 1      # the last batch, for the step that is not counted
    for _ in sys.stdin:
        began = time.perf_counter()
        step(*batches[k % len(batches)]).item()
        k += 1
        print(json.dumps({"name": "step", "value": time.perf_counter() - began, "unit": "s"}), flush=True)
    print(json.dumps({"name": "peak resident memory", "value": peak_resident() / 1e6, "unit": "MB"}))


def linear_speeds(torch, rows, n_in, n_out, dtype, least):
    """Returns the GFLOP/s of F.linear's forward, dX and dW (as autograd computes dX and dW). Each result is
    the best of the runs of at least `least` seconds together."""
    x, w, dy = (torch.randn(*shape).to(dtype) for shape in ((rows, n_in), (n_out, n_in), (rows, n_out)))
    ops = {"forward": lambda: torch.nn.functional.linear(x, w), "dX": lambda: dy.mm(w),
           "dW": lambda: dy.t().mm(x)}
    best = {}
    with torch.no_grad():
        for name, op in ops.items():
            op()
            end = time.perf_counter() + least
            while name not in best or time.perf_counter() < end:
                began = time.perf_counter()
                op()
                best[name] = min(best.get(name, 1e9), time.perf_counter() - began)
    return {name: 2e-9 * rows * n_in * n_out / s for name, s in best.items()}


# ------------------------------------------------------------------------------------------------------- gemm
LIBRARIES = {"OpenBLAS": ("gemm_openblas", "libopenblas-dev"),
             "oneDNN": ("gemm_onednn",
                        "oneDNN 3 (PyPI: onednn-devel-cpu-gomp, as make bench-peers installs it)")}


def library_speeds(path, shape, precision, threads, least):
    """Returns the speeds of forward, dX and dW in GFLOP/s that a program of bench/peers/gemm.c prints.
    Returns None if the program's library has no products in the precision."""
    out = subprocess.run([path, *map(str, shape), str(least)] + (["bf16"] if precision != "32-true" else []),
                         stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                         env=dict(os.environ, OMP_NUM_THREADS=str(threads),
                                  OPENBLAS_NUM_THREADS=str(threads)), text=True)
    if out.returncode not in (0, 2):
        sys.exit(f"pytorch.py: {path} ended with status {out.returncode}: {out.stderr.strip()}")
    return (None if out.returncode
            else {name: float(speed) for name, speed in (line.split() for line in out.stdout.splitlines())})


def gemm(args, report):
    torch = threads(args.threads)
    gemm_program, shapes = program(args, "gemm"), [s for s in GEMMS if not args.rows or s[0] in args.rows]
    if not shapes or args.precisions == ["bf16-mixed"]:
        sys.exit("pytorch.py: nothing to measure: " +
                 (f"no shape has {args.rows} rows" if not shapes else "the products of bf16-mixed are those "
                  "of bf16-true"))
    libraries, versions = {}, [f"PyTorch {torch.__version__} "
                               f"({'MKL' if torch.backends.mkl.is_available() else 'without MKL'})"]
    for library, (name, what) in LIBRARIES.items():
        path = os.path.join(args.build, name)
        if os.access(path, os.X_OK):
            libraries[library] = path
            versions.append(output_of([path, "--version"]).strip())
        else:
            report.say(f"without {library}: {path} is not there; "
                       f"make bench-programs builds it where {what} is installed")
    report.say(f"GFLOP/s of the products of a layer, {args.threads} threads; "
               f"tinytrain and {', '.join(versions)} in turn, each the best of a turn's runs, medians of "
               f"{args.rounds} turns; beside each the fastest of the others")
    for precision in args.precisions:
        if precision == "bf16-mixed":
            continue      # bf16-mixed runs the same products as bf16-true, so they are measured once
        dtype = torch.float32 if precision == "32-true" else torch.bfloat16
        mine, peers, peaks = {}, {}, {}      # peers: speeds by peer's name, then by product
        for turn in range(args.rounds):
            for shape in shapes:
                rows, n_in, n_out = shape
                command = [gemm_program, "--json", "--precision", precision, "--threads", str(args.threads),
                           "--seconds", str(args.seconds), "--rows", str(rows), "--in", str(n_in),
                           "--out", str(n_out)]
                for name, r in rows_of(output_of(command)).items():
                    mine.setdefault((*shape, name.split()[-1]), []).append(r["value"])
                    peaks[shape] = max(peaks.get(shape, 0), r["peak"])
                speeds = {"PyTorch": linear_speeds(torch, *shape, dtype, args.seconds / 3)}
                speeds.update({library: library_speeds(path, shape, precision, args.threads, args.seconds / 3)
                               for library, path in libraries.items()
                               if turn == 0 or library in peers})
                for who, of in speeds.items():
                    for op, speed in (of or {}).items():
                        peers.setdefault(who, {}).setdefault((*shape, op), []).append(speed)
        mine = {k: statistics.median(v) for k, v in mine.items()}
        peers = {who: {k: statistics.median(v) for k, v in x.items()} for who, x in peers.items()}
        for library in (x for x in libraries if x not in peers):
            report.say(f"{precision}: without {library}, which has no such products on this CPU")
        groups = {}
        for key in mine:
            who = max(peers, key=lambda p: peers[p][key])
            report.row(f"{precision}: {key[0]} x {key[1]} -> {key[2]} {key[3]}", mine[key], "GFLOP/s",
                       peers[who][key], peaks[key[:3]], who)
            for group in ((key[0], min(key[1:3])), "all of these"):
                groups.setdefault(group, []).append(key)
        for group, keys in sorted(groups.items(), key=lambda g: isinstance(g[0], str)):
            name = (f"{precision}: " +
                    (group if isinstance(group, str) else f"{group[0]} rows, D {group[1]}: all nine") +
                    ", by flops")
            over = lambda speed: sum(k[0] * k[1] * k[2]
                                     for k in keys) / sum(k[0] * k[1] * k[2] / speed(k) for k in keys)
            value, peak = over(lambda k: mine[k]), max(peaks[k[:3]] for k in keys)
            for who in peers:
                report.row(f"{name}, {who}", value, "GFLOP/s", over(lambda k: peers[who][k]), peak, who)
            if len(peers) > 1:
                report.row(name + ", the fastest", value, "GFLOP/s",
                           over(lambda k: max(p[k] for p in peers.values())), peak, "the fastest of each")


# ------------------------------------------------------------------------------------------------------- step
def write_tensors(path, tensors):
    """Writes a safetensors file with the standard library alone. tensors: lists of numbers below 2^31, or
    (bytes, shape)."""
    header, data = {}, []
    for name, x in tensors.items():
        raw, shape, dtype = ((*x, "U8") if isinstance(x, tuple)
                             else (array.array("i", x).tobytes(), [len(x)], "I32"))
        at = sum(map(len, data))
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(raw)]}
        data.append(raw)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as f:
        f.write(b"".join([len(text).to_bytes(8, "little"), text] + data))


def write_batches(path, batches):
    """Writes batches, which are lists of (ids, label), as a safetensors file."""
    tensors = {}
    for b, batch in enumerate(batches):
        tensors[f"batch{b}.input_ids"] = [i for ids, _ in batch for i in ids]
        tensors[f"batch{b}.seq_start"] = list(itertools.accumulate([0] + [len(ids) for ids, _ in batch]))
        tensors[f"batch{b}.labels"] = [label for _, label in batch]
    write_tensors(path, tensors)


def write_images(path, images, side, batches=1):
    rng, tensors = random.Random(1), {}
    for b in range(batches):
        tensors[f"batch{b}.pixels"] = (rng.randbytes(images * side * side * 3), [images, side, side, 3])
        tensors[f"batch{b}.labels"] = [k % 2 for k in range(images)]
    write_tensors(path, tensors)


def step(args, report):
    with tempfile.TemporaryDirectory() as folder:
        path, rng, results = os.path.join(folder, "batches.safetensors"), random.Random(1), {}
        if args.vit:
            args.length = (args.pixels // int(args.vit.split("/")[1])) ** 2 + 1
            what, model = f"{args.seqs} images of {args.pixels} x {args.pixels}", "ViT-" + args.vit
            write_images(path, args.seqs, args.pixels)
        else:
            what, model = f"{args.seqs} x {args.length}", "DistilBERT-base"
            write_batches(path,
                          [[([rng.randrange(30522) for _ in range(args.length)], s % 2)
                            for s in range(args.seqs)]])
        tokens = args.seqs * args.length
        layers = f" ({args.layers} layers)" if args.layers else ""
        report.say(f"a training step of {model}{layers}, {what}, {args.threads} threads, "
                   f"medians of {args.rounds} steps each, in turn")
        # programs of two groups run one after the other: all of them together would need more memory
        for group in (("32-true",), ("bf16-mixed", "bf16-true")):
            group = [p for p in group if p in args.precisions]
            variants = ([PAIRS[p] for p in group] +
                        ([PAIRS[p] + " compiled" for p in group] if args.compile else []))
            programs = [ours(args, p, path) for p in group] + [theirs(args, v, path) for v in variants]
            in_turn(programs, args.rounds, 2 if args.compile else 1)
            results.update({p.label: p for p in programs})
    flops = {}
    for label, p in results.items():
        p.speed = tokens / statistics.median(p.seconds)
        if label.startswith("tinytrain"):
            row = p.rows["matmuls and attention, whole step, mean"]
            # flops: GFLOP per token
            p.peak, flops[label] = row["peak"], row["value"] / p.rows["tokens a second, mean"]["value"]
    for label, p in results.items():
        report.say(f"  {label:<32} {1e3 * tokens / p.speed:8.0f} ms {p.speed:8.0f} "
                   f"tokens/s {p.memory():8.0f} "
                   "MB at most")
    pairs = [(a, "PyTorch " + PAIRS[a.split()[-1]] + end) for a in results if a.startswith("tinytrain")
             for end in ("", " compiled")]
    best = [max((l for l in results if l.startswith(side)), key=lambda l: results[l].speed)
            for side in ("tinytrain", "PyTorch")]
    for a, b, note in [(a, b, "") for a, b in pairs if b in results] + [(*best, "fastest of each: ")]:
        mine, peer, name = results[a], results[b], f"{note}{what}, {a.split()[-1]}, {b}"
        report.row(name, mine.speed, "tokens/s", peer.speed)
        report.row(name, mine.speed * flops[a], "GFLOP/s", peak=mine.peak)
        report.row(name + ", memory", mine.memory(), "MB", peer.memory())


# ------------------------------------------------------------------------------------------------------- imdb
def imdb_batches(args, shuffled, grouped):
    """Forms 50 batches of 16 reviews, and writes --batches of them to each of two files: one has batches of
    reviews in random order; one has batches of reviews sorted by length, taken evenly from short to long (as
    transformers' group_by_length sorts)."""
    import minilm_imdb
    from transformers import BertTokenizer
    rows = minilm_imdb.encode(BertTokenizer.from_pretrained(args.vocab),
                              minilm_imdb.reviews(args.imdb, "train", 50 * args.batch, args.seed))
    random.Random(args.seed).shuffle(rows)
    cut = lambda x: [x[i:i + args.batch] for i in range(0, len(x), args.batch)]
    n, by_length = args.batches, cut(sorted(rows, key=lambda r: len(r[0])))
    write_batches(shuffled, cut(rows)[:n])
    write_batches(grouped, [by_length[(2 * k + 1) * len(by_length) // (2 * n)] for k in range(n)])


def lengths_of(path):
    """Returns the number of tokens in a file of batches, and their number with padding."""
    from safetensors.numpy import load_file
    starts = [t for name, t in load_file(path).items() if name.endswith("seq_start")]
    return sum(int(t[-1]) for t in starts), sum(int((t[1:] - t[:-1]).max()) * (len(t) - 1) for t in starts)


def imdb(args, report):
    if not 1 <= args.batches <= 50:
        sys.exit("pytorch.py: --batches must be in 1..50")
    with tempfile.TemporaryDirectory() as folder:
        files = {"random order": os.path.join(folder, "random.safetensors"),
                 "grouped by length": os.path.join(folder, "grouped.safetensors")}
        writer = multiprocessing.Process(target=imdb_batches, args=(args, *files.values()))
        writer.start()
        writer.join()
        if writer.exitcode:
            sys.exit("pytorch.py: the batches were not written")
        for precision in args.precisions:
            for order, path in ((o, f) for o, f in files.items() if o.split()[0] in args.orders):
                tokens, padded = lengths_of(path)
                report.say(f"{args.batches} batches of {args.batch} reviews, {order}: {tokens} "
                           f"tokens, {padded} with padding ({padded / tokens:.2f} times)")
                programs = [ours(args, precision, path), theirs(args, PAIRS[precision], path)]
                in_turn(programs, args.batches)
                mine, peer = programs
                name = f"imdb, {order}, {precision}, {peer.label}"
                report.row(name, tokens / sum(mine.seconds), "tokens/s", tokens / sum(peer.seconds))
                report.row(name + ", memory", mine.memory(), "MB", peer.memory())


# ------------------------------------------------------------------------------------------------------ epoch
def epoch(args, report):
    """Measures an epoch of tinytrain and an epoch of PyTorch. PyTorch's test set is larger by the number of
    reviews that tinytrain's example holds out for validation."""
    report.say(f"one epoch of MiniLM on {args.train} reviews (and a look at {args.test + args.train // 10} "
               f"others), {args.threads} threads, from process start to end, fp32")
    with tempfile.TemporaryDirectory() as folder:
        common = ["--epochs", "1", "--batch", "16", "--lr", "5e-5", "--threads", str(args.threads), "--train",
                  str(args.train)]
        commands = [[program(args, "distilbert_imdb"), "--data", args.imdb, "--model", args.start, "--test",
                     str(args.test), "--out", os.path.join(folder, "run")] + common,
                    [sys.executable,
                     os.path.join(os.path.dirname(os.path.abspath(__file__)), "minilm_imdb.py"), "--start",
                     args.start, "--imdb", args.imdb,
                     "--test", str((args.test + args.train // 10) // 2 * 2)] + common]
        seconds = []
        for command in commands:
            began = time.perf_counter()
            out = output_of(command)
            seconds.append(time.perf_counter() - began)
            report.say("  " +
                       "\n  ".join(line for line in out.splitlines() if "accuracy" in line and
                                   "%" not in line))
    report.say(f"  wall time: tinytrain {seconds[0]:.1f} s, PyTorch {seconds[1]:.1f} s")
    report.row("epoch of MiniLM on IMDb, by wall time", args.train / seconds[0], "reviews/s",
               args.train / seconds[1])


def positive(text):
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not positive")
    return value


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sub = p.add_subparsers(dest="what", required=True, metavar="gemm|step|imdb|epoch")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    subs = {name: sub.add_parser(name) for name in ("gemm", "step", "imdb", "epoch", "turns")}
    for name, s in subs.items():
        s.add_argument("--threads", type=positive, default=cores, metavar="N",
                       help=f"of both sides ({cores})")
        s.add_argument("--json", action="store_true", help="an object a line")
        s.add_argument("--build", default="build", metavar="DIR", help="where the C programs are (build)")
        if name != "epoch":
            s.add_argument("--precisions", nargs="+", choices=list(PAIRS),
                           default=["32-true"] if name == "imdb" else list(PAIRS))
        if name in ("gemm", "step"):
            s.add_argument("--rounds", type=positive, default=3 if name == "gemm" else 5, metavar="N",
                           help="turns of each side")
        if name in ("imdb", "step", "turns"):
            s.add_argument("--layers", type=positive, metavar="N", help="of the model, if not its own number")
        if name in ("step", "turns"):
            s.add_argument("--vit", metavar="SIZE", help="a vision transformer (Ti/16, S/16, B/16, "
                           "L/16 or H/14) instead of DistilBERT")
            s.add_argument("--pixels", type=positive, default=224, metavar="N",
                           help="height and width of its images (224)")
        if name in ("imdb", "epoch"):
            s.add_argument("--imdb", required=True, metavar="DIR", help="folder aclImdb")
    subs["gemm"].add_argument("--seconds", type=float, default=0.5, metavar="X",
                              help="of a turn, for one shape (0.5)")
    subs["gemm"].add_argument("--rows", type=positive, nargs="+", help="only shapes with so many rows")
    subs["step"].add_argument("--seqs", type=positive, default=8, metavar="N",
                              help="sequences or images in a step (8)")
    subs["step"].add_argument("--length", type=positive, default=256, metavar="N",
                              help="tokens of each (256)")
    subs["step"].add_argument("--compile", action="store_true",
                              help="torch.compile beside eager; it takes a minute to compile")
    subs["imdb"].add_argument("--vocab", required=True, metavar="DIR",
                              help="folder with vocab.txt of bert-base-uncased")
    subs["imdb"].add_argument("--batches", type=positive, default=12, metavar="N",
                              help="batches of each order (12)")
    subs["imdb"].add_argument("--orders", nargs="+", choices=["random", "grouped"],
                              default=["random", "grouped"], help="of the reviews (both)")
    subs["imdb"].add_argument("--batch", type=positive, default=16, metavar="N",
                              help="reviews in a batch (16)")
    subs["imdb"].add_argument("--seed", type=int, default=1, metavar="N", help="of the choice of reviews (1)")
    subs["epoch"].add_argument("--start", required=True, metavar="DIR",
                               help="written by bench/minilm_imdb.py --make-start")
    subs["epoch"].add_argument("--train", type=positive, default=4000, metavar="N",
                               help="reviews to train on (4000)")
    subs["epoch"].add_argument("--test", type=positive, default=200, metavar="N",
                               help="reviews to test on (200)")
    subs["turns"].add_argument("--variant", required=True)
    subs["turns"].add_argument("--batches", required=True)
    args = p.parse_args()
    for option, file in (("imdb", "train"), ("vocab", "vocab.txt"), ("start", "model.safetensors")):
        folder = getattr(args, option, None)
        if folder and not os.path.exists(os.path.join(folder, file)):
            p.error(f"--{option} {folder}: there is no {file} in it")
    if args.threads > 256:
        p.error(f"--threads {args.threads}: tinytrain has at most 256")
    if getattr(args, "vit", None):
        size, _, patch = args.vit.partition("/")
        if size not in VITS or not patch.isdigit() or not 0 < int(patch) <= args.pixels:
            p.error(f"--vit {args.vit}: a size is {', '.join(VITS)} and how wide a patch is, "
                    "such as L/16 or H/14")
        if args.pixels % int(patch):
            p.error(f"--pixels {args.pixels} is not a multiple of the patches of {args.vit}")
    elif getattr(args, "length", 0) > 512:
        p.error(f"--length {args.length}: DistilBERT has 512 positions")
    if args.what == "turns":
        return turns(args)
    return {"gemm": gemm, "step": step, "imdb": imdb, "epoch": epoch}[args.what](args, Report(args.json))


if __name__ == "__main__":
    main()
