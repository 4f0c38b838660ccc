#!/usr/bin/env python3
"""What bench/gpu.sh runs of Python: batches for both sides, PyTorch's side of a measurement, and the report.

    python bench/gpu.py batches imdb --seqs 12 --batches 60 --to FILE
        vit, fixed, imdb or gpt2; standard library only
    python bench/gpu.py torch --batches FILE --variant 'bf16 weights' ...
        steps of the model in PyTorch, on "cuda" or "cpu"
    python bench/gpu.py report --state DIR --to PREFIX ...
        PREFIX.json and PREFIX.md from what the stages left
    python bench/gpu.py expected
        the table of bench/results/NOTES.md: what each kernel should take, by its bytes and FLOPs

Model, optimizer and variants are bench/pytorch.py's. PyTorch's inputs lie on the device, as it wants them,
before the clock starts; then all of its steps are started without waiting for one, and the clock stops when
the last is done. tinytrain's clock runs over as many steps, with the copy of each batch to the device, and
the results of each step, which are read while the next is under way.

`imdb` without --imdb draws lengths from a table of IMDb's quantiles; with --imdb DIR --vocab DIR it takes
reviews. Batches are in random order: PyTorch pads each to its longest sequence, tinytrain has no padding."""
import argparse
import json
import os
import random
import sys
import tempfile
import time

import pytorch

# Tokens of the 25,000 reviews of IMDb's train split by bert-base-uncased's vocabulary, cut to 512: quantiles
# in steps of 5% (mean 275.3).
IMDB_QUANTILES = [13, 86, 123, 147, 158, 168, 178, 189, 202, 217, 233, 253, 276, 306, 340, 382, 436, 509, 512,
                  512, 512]


# ---------------------------------------------------------------------------------------------------- batches
def imdb_length(rng):
    at = rng.random() * (len(IMDB_QUANTILES) - 1)
    low = IMDB_QUANTILES[int(at)]
    return round(low + (at - int(at)) * (IMDB_QUANTILES[int(at) + 1] - low))


def batches(args):
    rng = random.Random(1)
    if args.kind == "vit":
        pytorch.write_images(args.to, args.seqs, args.pixels, args.batches)
    elif args.kind == "imdb" and args.imdb:
        args.batch = args.seqs
        with tempfile.TemporaryDirectory() as folder:
            pytorch.imdb_batches(args, args.to, os.path.join(folder, "grouped.safetensors"))
    else:
        length = (lambda: min(args.length, imdb_length(rng))) if args.kind == "imdb" else lambda: args.length
        vocabulary = 50257 if args.kind == "gpt2" else 30522
        pytorch.write_batches(args.to,
                              [[([rng.randrange(vocabulary) for _ in range(length())], s % 2)
                                for s in range(args.seqs)] for _ in range(args.batches)])


# ------------------------------------------------------------------------------------------------------ torch
def tokens_of(inputs, args):
    """without padding"""
    if args.vit:
        return len(inputs["pixel_values"]) * ((args.pixels // int(args.vit.split("/")[1])) ** 2 + 1)
    return int(inputs["input_ids"].numel() if inputs["attention_mask"] is None
               else inputs["attention_mask"].sum())


def run_torch(args):
    torch = pytorch.threads(args.threads)
    on_gpu = args.device == "cuda"
    wait = torch.cuda.synchronize if on_gpu else lambda: None
    in_use = lambda: torch.cuda.mem_get_info()[1] - torch.cuda.mem_get_info()[0]
    if on_gpu:
        x = torch.ones(64, 64, device="cuda", dtype=torch.bfloat16)
        (x @ x).sum().item()      # so that CUDA's context and cuBLAS are there
        before = in_use()
    step, all_batches = pytorch.training(args, args.device)
    # To have compiled: the files that torch.compile keeps make the next process faster.
    if args.steps == 0:
        for batch in all_batches[:3]:      # another length has it compile again, for any length
            step(*batch)
        return wait()
    n = len(all_batches)
    if args.count:
        from torch.utils.flop_counter import FlopCounterMode
        with FlopCounterMode(display=False) as counter:
            for batch in all_batches:
                step(*batch)
        flops = counter.get_total_flops() / n
    tokens = [tokens_of(inputs, args) for inputs, _ in all_batches]
    for k in range(-args.warm, 0):
        step(*all_batches[k % n])
    wait()
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    for k in range(args.steps):
        loss = step(*all_batches[k % n])
    wait()
    seconds = time.perf_counter() - began
    if not torch.isfinite(loss):
        sys.exit("gpu.py: the loss is not finite")
    report = pytorch.Report(True)
    report.row("tokens a second, mean", sum(tokens[k % n] for k in range(args.steps)) / seconds, "tokens/s")
    report.row("time of a step, mean", 1e3 * seconds / args.steps, "ms")
    if args.count:
        report.row("FLOPs of a step, mean", flops / 1e12, "TFLOP")
    if on_gpu:
        report.row("device memory grew by", (in_use() - before) / 1e6, "MB")
        report.row("memory of tensors at most", torch.cuda.max_memory_allocated() / 1e6, "MB")
    else:
        report.row("peak resident memory", pytorch.peak_resident() / 1e6, "MB")


# ----------------------------------------------------------------------------------------------------- report
WHAT = {"vit": "ViT", "fixed": "DistilBERT", "imdb": "DistilBERT, IMDb lengths", "gpt2": "GPT-2"}
SIDES = {"tinytrain": "tinytrain", "none": "tinytrain, nothing recomputed", "eager": "PyTorch eager",
         "compile": "torch.compile", "reduce": "torch.compile, reduce-overhead"}


def table(header, lines):
    number = lambda x: f"{x:.4g}" if abs(x) < 1000 else f"{x:.0f}"
    text = lambda x: "" if x is None else x if isinstance(x, str) else number(x)
    return (["| " + " | ".join(header) + " |", "| " + " | ".join("---" for _ in header) + " |"] +
            ["| " + " | ".join(map(text, line)) + " |" for line in lines])


def pairs(texts):
    return dict(t.split("=", 1) for t in texts)


def table_of_ops(measured):
    """of a run of step --ops: each op by itself, beside what it should take by its bytes and FLOPs, at 85% of
    the rate of copies and 60% of that of matrix products of the same GPU"""
    ops, lines = {}, []
    for name, r in measured["rows"].items():
        if name.startswith("op "):
            op, what = name[3:].split(": ")
            ops.setdefault(op, {})[what] = r["value"]
    for op, r in sorted(ops.items(), key=lambda item: -item[1]["alone"]):
        seconds, rate, flops = r["alone"] / 1e3, r["bytes read and written"], r.get("multiply-adds")
        least = max(rate * seconds / (0.85 * measured["copies"]),
                    (flops or 0) * seconds / (0.6 * measured["peak"]))
        each = 1e3 * r["alone"] / r["launches"]
        lines.append([op, str(round(r["launches"])), r["alone"], each, rate, flops, 1e3 * least])
    return table(["op", "launches a step", "ms a step", "us a launch", "GB/s", "TFLOP/s",
                  "ms that it should take"], lines) if lines else []


# Bandwidth and rate of bf16 products of an H200 by its data sheet, bytes and FLOPs a second.
H200 = (4.8e12, 989e12)
# Sequences of a micro-batch, their length, heads of 64, the inner width; and which share of the pairs of
# positions attention looks at.
MODELS = {"ViT-L/16, 64 images": (64, 197, 16, 4096, 1),
          "DistilBERT-base, 12 x 512 tokens": (12, 512, 12, 3072, 1),
          "GPT-2 of 124 million, 16 x 1,024 tokens": (16, 1024, 12, 3072, 0.5)}
PARAMETERS = {"ViT-L/16": 304e6, "DistilBERT-base": 67e6, "GPT-2 of 124 million": 124e6}


def expected():
    """of each kernel: model, name, bytes, FLOPs"""
    found = []
    for model, (seqs, length, heads, inner, share) in MODELS.items():
        rows, width = seqs * length, 64 * heads
        wide = 2 * rows * width                              # bytes of rows of the model's width
        pairs, sums, starts = share * seqs * length ** 2 * width, 4 * rows * heads, 4 * (seqs + 1)
        stats = 8 * rows + 4 * width                         # mean and 1/std of each row; weight and bias
        found += [(model, "layer norm", 2 * wide + stats, 0),
                  (model, "layer norm backward", 3 * wide + stats, 0),
                  (model, "GELU, or its backward in place", 2 * 2 * rows * inner, 0),
                  (model, "add", 3 * wide, 0),
                  (model, "attention forward", 4 * wide + sums + starts, 4 * pairs)]
        if length <= 256:  # all keys of a sequence are one block's
            found += [(model, "attention backward, in one pass", 8 * wide + 2 * sums + starts, 10 * pairs)]
        else:
            found += [(model, "attention backward, dq", 6 * wide + 2 * sums + starts, 6 * pairs),
                      (model, "attention backward, dk and dv", 6 * wide + 2 * sums + starts, 8 * pairs)]
    for model, n in PARAMETERS.items():
        found += [(model, "Adam, all in f32", 28 * n, 0), (model, "Adam, all in bf16", 14 * n, 0)]
    return found


def table_expected():
    lines = ["| model | kernel, one call | MB | GFLOP | us by bytes | us by FLOPs | us that it should take |",
             "| --- | --- | --- | --- | --- | --- | --- |"]
    for model, name, size, flops in expected():
        by_bytes, by_flops = 1e6 * size / H200[0], 1e6 * flops / H200[1]
        should = max(by_bytes / 0.85, by_flops / 0.6)
        lines.append(f"| {model} | {name} | {size / 1e6:.1f} | {f'{flops / 1e9:.1f}' if flops else ''} | "
                     f"{by_bytes:.1f} | {f'{by_flops:.1f}' if flops else ''} | {should:.0f} |")
    return lines


def make_report(args):
    stages, measured, rows, lines = [], {}, [], []
    about, shapes = pairs(args.about), pairs(args.shapes)
    files = sorted((f for f in os.listdir(args.state) if f.endswith(".stage")),
                   key=lambda f: os.path.getmtime(os.path.join(args.state, f)))
    for file in files:
        with open(os.path.join(args.state, file)) as f:
            name, result, seconds, command = f.read().rstrip("\n").split("\t")
        stages.append({"name": name, "result": result, "seconds": int(seconds), "command": command})
        output = os.path.join(args.state, name + ".out")
        if os.path.exists(output) and result == "ok":
            with open(output) as f:
                measured[name] = pytorch.rows_of(f.read())

    def row(name, value, unit, peer=None, peak=None):
        rows.append({"name": name, "value": value, "unit": unit, "peak": peak, "of_peak": value / peak if peak
                     else None, "peer": peer, "ratio": value / peer if peer else None})

    for name, r in measured.get("peaks", {}).items():
        row(name, r["value"], r["unit"])
    value = lambda run, name: measured.get(run, {}).get(name, {}).get("value")
    runs = [tuple(name.split(".")) for name in measured if name.count(".") == 2]
    for what, precision in dict.fromkeys(r[:2] for r in runs):
        label = f"{WHAT[what]}, {shapes[what]}, {precision}"
        speeds = {side: value(f"{what}.{precision}.{side}", "tokens a second, mean") for side in SIDES}
        own_rate = value(f"{what}.{precision}.tinytrain", "matmuls and attention, whole step, mean")
        grown = lambda side: (value(f"{what}.{precision}.{side}", "device memory grew by") or
                              value(f"{what}.{precision}.{side}", "peak resident memory"))
        for side, who in SIDES.items():
            run, speed = f"{what}.{precision}.{side}", speeds[side]
            if not speed:
                continue
            millis, memory, ratio, of_peak = value(run, "time of a step, mean"), grown(side), None, None
            rate = measured[run].get("matmuls and attention, whole step, mean")
            planned = value(run, "planned memory")
            row(f"{label}, {who}: time of a step", millis, "ms")
            row(f"{label}, {who}: tokens a second", speed, "tokens/s")
            if rate:
                of = label if side == "tinytrain" else f"{label}, {who}"
                row(f"{of}: matmuls and attention", rate["value"], rate["unit"], peak=rate["peak"])
                row(f"{of}: memory planned", planned, "MB")
                row(f"{of}: memory measured beside the plan", memory, "MB", peer=planned)
                of_peak = (f"{rate['value']:.4g} {rate['unit']}" +
                           (f", {100 * rate['of_peak']:.1f}%" if rate["of_peak"] else ""))
            elif speeds["tinytrain"]:      # the same FLOPs, in the peer's time
                ratio = speeds["tinytrain"] / speed
                of_peak = f"{own_rate / ratio:.4g}" if own_rate else None
                row(f"{label}: tokens a second beside {who}", speeds["tinytrain"], "tokens/s", peer=speed)
                row(f"{label}: memory measured beside {who}", grown("tinytrain"), "MB", peer=memory)
            tensors = planned if rate else value(run, "memory of tensors at most")
            flops = value(run, "FLOPs of a step, mean")
            if flops:
                row(f"{label}, {who}: FLOPs of a step", flops, "TFLOP")
            lines.append([label, who, millis, f"{speed:.0f}", ratio, flops, of_peak, tensors, memory])

    with open(args.to + ".json", "w") as f:
        json.dump({**about, "stages": stages, "rows": rows}, f, indent=1)
        f.write("\n")
    text = ([f"# {about.get('gpu', 'GPU')}, {about.get('date', '')}", ""] +
            [f"- {k}: {f'`{v}`' if k == 'command' else v}" for k, v in about.items()])
    text += ["", "Memory in MB: `tensors` is what tinytrain planned, and the most that PyTorch's allocator "
             "had handed out; `measured` is by how much the device's memory in use grew "
             "(without a GPU: the process's most). `ratio`: tinytrain's tokens/s over the peer's. "
             "The share is of cuBLASLt's products in the same process; there peers are taken to do the FLOPs "
             "of tinytrain's first row. TFLOP: of a step's matmuls and attention, with what is recomputed, "
             "as each side counts its own (torch.utils.flop_counter, in eager mode).", ""]
    columns = ["what", "side", "ms a step", "tokens/s", "ratio", "TFLOP", "matmuls and attention", "tensors",
               "measured"]
    text += table(columns, lines) if lines else ["Nothing was measured."]
    peaks = {name: r["value"] for name, r in measured.get("peaks", {}).items()}
    for name in [name for name in measured if name.endswith(".ops")]:
        what, precision, _ = name.split(".")
        peak = (measured[name].get("matmuls and attention, whole step, mean") or {}).get("peak")
        copies = peaks.get("copies of memory, bytes read and written")
        if peak and copies:
            text += (["", f"Each op by itself, {WHAT[what]}, {shapes[what]}, {precision}:", ""] +
                     table_of_ops({"rows": measured[name], "copies": copies, "peak": peak}))
    if "peaks" in measured:
        text += ([""] +
                 table(["at most", "", ""],
                       [[name, r["value"], r["unit"]] for name, r in measured["peaks"].items()]))
    text += ([""] +
             table(["stage", "result", "s"], [[s["name"], s["result"], str(s["seconds"])] for s in stages]))
    with open(args.to + ".md", "w") as f:
        f.write("\n".join(text) + "\n")
    print("\n".join(text))


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sub = p.add_subparsers(dest="what", required=True)
    b, t, r, _ = (sub.add_parser(name) for name in ("batches", "torch", "report", "expected"))
    b.add_argument("kind", choices=list(WHAT))
    b.add_argument("--to", required=True, metavar="FILE")
    b.add_argument("--seqs", type=pytorch.positive, default=12, metavar="N",
                   help="sequences or images in a batch")
    b.add_argument("--length", type=pytorch.positive, default=512, metavar="N",
                   help="tokens of each; of imdb at most")
    b.add_argument("--pixels", type=pytorch.positive, default=224, metavar="N")
    b.add_argument("--batches", type=pytorch.positive, default=4, metavar="N")
    b.add_argument("--imdb", metavar="DIR", help="folder aclImdb; needs transformers")
    b.add_argument("--vocab", metavar="DIR", help="folder with vocab.txt of bert-base-uncased")
    b.add_argument("--seed", type=int, default=1)
    t.add_argument("--variant", required=True, help="as bench/pytorch.py has them: 'bf16 weights', "
                   "'bf16 autocast', 'fp32', and ' compiled' or ' compiled with reduce-overhead' behind")
    t.add_argument("--batches", required=True, metavar="FILE")
    t.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    t.add_argument("--warm", type=pytorch.positive, default=5, metavar="N",
                   help="steps before those measured")
    t.add_argument("--steps", type=int, default=20, metavar="N", help="steps measured; 0: compile only")
    t.add_argument("--count", action="store_true", help="FLOPs of a step too, by torch.utils.flop_counter; "
                   "not of what torch.compile has compiled")
    t.add_argument("--vit", metavar="SIZE")
    t.add_argument("--gpt2", action="store_true")
    t.add_argument("--pixels", type=pytorch.positive, default=224)
    t.add_argument("--layers", type=pytorch.positive)
    t.add_argument("--threads", type=pytorch.positive, default=len(os.sched_getaffinity(0)))
    r.add_argument("--state", required=True, metavar="DIR")
    r.add_argument("--to", required=True, metavar="PREFIX")
    r.add_argument("--shapes", nargs="*", default=[], metavar="KIND=TEXT")
    r.add_argument("--about", nargs="*", default=[], metavar="NAME=TEXT")
    args = p.parse_args()
    if args.what == "expected":
        return print("\n".join(table_expected()))
    return {"batches": batches, "torch": run_torch, "report": make_report}[args.what](args)


if __name__ == "__main__":
    main()
