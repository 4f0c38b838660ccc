#!/usr/bin/env python3
"""The Python part of bench/gpu.sh: batches for both sides, PyTorch's side of a measurement, and the report.

    python bench/gpu.py batches imdb --seqs 12 --batches 60 --to FILE
        writes batches of vit, fixed, imdb or gpt2; standard library only
    python bench/gpu.py torch --batches FILE --variant 'bf16 weights' ...
        runs steps of the model in PyTorch, on "cuda" or "cpu"
    python bench/gpu.py peers --list FILE --state DIR
        runs several `gpu.py torch`, which compile side by side and are timed one at a time
    python bench/gpu.py training -- COMMAND
        runs a training from its start to its end
    python bench/gpu.py report --state DIR --to PREFIX ...
        writes PREFIX.json and PREFIX.md from the results of the stages

Model, optimizer and variants are those of bench/pytorch.py. PyTorch's inputs are on the device, in the form
that PyTorch needs, before the clock starts. Then all of PyTorch's steps are started without waiting for a
step, and the clock stops when the last step is done. tinytrain's clock runs over the same number of steps,
and includes the copy of each batch to the device and the results of each step, which are read while the next
step is in flight.

`imdb` without --imdb draws lengths from a table of IMDb's quantiles; with --imdb DIR --vocab DIR it takes
real reviews. Batches are in random order: PyTorch pads each to its longest sequence, tinytrain has no
padding."""
import argparse
import contextlib
import csv
import faulthandler
import fcntl
import json
import os
import random
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time

import pytorch

# Quantiles, in steps of 5%, of the tokens of the 25,000 reviews of IMDb's train split by bert-base-uncased's
# vocabulary, cut to 512 (mean 275.3).
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
    """Returns the number of tokens of a batch, without padding."""
    if args.vit:
        return len(inputs["pixel_values"]) * ((args.pixels // int(args.vit.split("/")[1])) ** 2 + 1)
    return int(inputs["input_ids"].numel() if inputs["attention_mask"] is None
               else inputs["attention_mask"].sum())


class Turn:
    """A lock on the GPU. The process holds the lock except while torch.compile compiles, because several
    processes compile at once. With --turn PREFIX the process writes PREFIX.ready after the first compilation,
    and then waits for PREFIX.go. A process that compiles nothing writes PREFIX.ready before the first use of
    the GPU. The process writes PREFIX.timed when the process no longer needs the GPU. Compilation runs at
    nice 19, so that measurements come first."""

    def __init__(self, args, wait):
        self.prefix, self.wait, self.used, self.taken = args.turn, wait, 0, False
        self.lock = open(args.lock, "a") if args.lock else None
        if "compiled" in args.variant and (self.prefix or self.lock):
            import torch._functorch.config
            from torch._dynamo import callback
            # Compiles the backward together with the forward. If the backward were compiled later,
            # activations would stay in GPU memory during that compilation.
            torch._functorch.config.force_non_lazy_backward_lowering = True
            triggers = (callback.CallbackTrigger.DYNAMO, callback.CallbackTrigger.LAZY_BACKWARD)
            callback.on_compile_start(lambda c: c.callback_trigger in triggers and self.leave())
            callback.on_compile_end(lambda c: c.callback_trigger in triggers and self.compiled())

    def priority(self, nice):
        with contextlib.suppress(OSError):      # only root may raise the priority again: other users keep it
            if os.geteuid() == 0:
                os.setpriority(os.PRIO_PROCESS, 0, nice)

    def mark(self, what):
        if self.prefix:
            open(f"{self.prefix}.{what}", "w").close()

    def my_turn(self):
        self.mark("ready")
        parent = os.getppid()
        while self.prefix and not os.path.exists(self.prefix + ".go"):
            if os.getppid() != parent:
                sys.exit("gpu.py: nobody is left to say whose turn it is")
            time.sleep(0.02)

    def take(self):
        if self.lock and not self.taken:
            fcntl.flock(self.lock, fcntl.LOCK_EX)
            self.taken = True

    def leave(self):
        if self.taken:
            self.wait()
            fcntl.flock(self.lock, fcntl.LOCK_UN)
            self.taken = False
        self.priority(19)

    def compiled(self):
        self.priority(0)
        self.my_turn()
        self.take()


def profiled(torch, step, steps):
    """Returns the profiler's record of `steps` calls of step(k) on the GPU."""
    from torch.profiler import ProfilerActivity, profile
    with profile(activities=[ProfilerActivity.CUDA]) as record:
        for k in range(steps):
            step(k)
        torch.cuda.synchronize()
    return record


def busy(record, steps):
    """Returns the milliseconds a step in which the GPU computes or copies. If the result is far below the
    wall time of a step, the GPU waits for its host. Prints the kernels that take longest to the log."""
    found = [(e.time_range.start, e.time_range.end, e.name) for e in record.events()
             if e.device_type.name == "CUDA"]
    total, end, by_name = 0.0, float("-inf"), {}
    # Times are in microseconds. Kernels of several streams overlap, and an overlap counts once.
    for begin, finish, name in sorted(found):
        total += max(0.0, finish - max(begin, end))
        end = max(end, finish)
        by_name.setdefault(name, []).append(finish - begin)
    for name, spans in sorted(by_name.items(), key=lambda item: -sum(item[1]))[:16]:
        print(f"kernel {1e-3 * sum(spans) / steps:8.3f} ms a step, {len(spans) / steps:6.1f} launches: "
              f"{name[:120]}", file=sys.stderr)
    return 1e-3 * total / steps


def run_torch(args):
    torch = pytorch.threads(args.threads)
    on_gpu = args.device == "cuda"
    wait = torch.cuda.synchronize if on_gpu else lambda: None
    in_use = lambda: torch.cuda.mem_get_info()[1] - torch.cuda.mem_get_info()[0]
    turn, before, compiled = Turn(args, wait), [0], "compiled" in args.variant

    def before_device():
        if not compiled:
            turn.my_turn()
        turn.take()
        if on_gpu:
            x = torch.ones(64, 64, device="cuda", dtype=torch.bfloat16)
            # makes CUDA create its context, and cuBLAS its handle, before memory is measured
            (x @ x).sum().item()
            before[0] = in_use()
    faulthandler.register(signal.SIGUSR1)
    if args.cache and os.path.exists(args.cache):
        with open(args.cache, "rb") as f:
            torch.compiler.load_cache_artifacts(f.read())
    step, all_batches = pytorch.training(args, args.device, before_device)
    n = len(all_batches)
    if args.count:
        from torch.utils.flop_counter import FlopCounterMode
        with FlopCounterMode(display=False) as counter:
            for batch in all_batches:
                step(*batch)
        flops = counter.get_total_flops() / n
    tokens = [tokens_of(inputs, args) for inputs, _ in all_batches]
    log = lambda what: print(f"{time.strftime('%T')} {what}", file=sys.stderr, flush=True)
    log("first steps")
    for k in range(-args.warm, 0):
        step(*all_batches[k % n])
        if k == -args.warm:
            wait()
            log("one step is done")
    wait()
    log("timed steps")
    # With reduce-overhead, recorded launches reuse memory without calls of the allocator, which counted the
    # memory during recording. So the peak is not reset for reduce-overhead.
    if on_gpu and "reduce-overhead" not in args.variant:
        torch.cuda.reset_peak_memory_stats()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(args.steps + 1)] if on_gpu else []
    began = time.perf_counter()
    for k in range(args.steps):
        if marks:
            marks[k].record()
        loss = step(*all_batches[k % n])
    if marks:
        marks[-1].record()
    wait()
    seconds = time.perf_counter() - began
    if not torch.isfinite(loss):
        sys.exit("gpu.py: the loss is not finite")
    report = pytorch.Report(True)
    report.row("tokens a second, mean", sum(tokens[k % n] for k in range(args.steps)) / seconds, "tokens/s")
    report.row("time of a step, mean", 1e3 * seconds / args.steps, "ms")
    if marks:
        each = sorted(a.elapsed_time(b) for a, b in zip(marks, marks[1:]))
        report.row("time of a step, median", each[len(each) // 2], "ms")
        report.row("time of a step, least", each[0], "ms")
    if args.count:
        report.row("FLOPs of a step, mean", flops / 1e12, "TFLOP")
    if on_gpu:
        # in_use() counts all processes, and with --turn other processes start and end meanwhile. With --turn
        # the growth is what this process's allocator took from the device, without some 100 MB of kernels.
        grown = torch.cuda.max_memory_reserved() if args.turn else in_use() - before[0]
        report.row("device memory grew by", grown / 1e6, "MB")
        report.row("memory of tensors at most", torch.cuda.max_memory_allocated() / 1e6, "MB")
    else:
        report.row("peak resident memory", pytorch.peak_resident() / 1e6, "MB")
    if compiled:
        from torch._dynamo.utils import counters
        report.row("graphs that were not recorded", counters["inductor"]["cudagraph_skips"], "graphs")
    if on_gpu:
        steps = min(5, args.steps)
        log("profiled steps")
        record = profiled(torch, lambda k: step(*all_batches[k % n]), steps)
        turn.leave()
        turn.mark("timed")
        report.row("time of a step that the GPU is busy", busy(record, steps), "ms")
    turn.mark("timed")
    if args.cache and not os.path.exists(args.cache):
        artifacts = torch.compiler.save_cache_artifacts()
        if artifacts:
            with open(args.cache, "wb") as f:
                f.write(artifacts[0])


# ------------------------------------------------------------------------------------------------------ peers
def said(state, name, result, seconds, command):
    """Writes the result of a stage in the format of bench/gpu.sh."""
    with open(os.path.join(state, name + ".stage"), "w") as f:
        f.write("\t".join((name, result, str(round(seconds)), command)) + "\n")
    print(f"{name:<36} {result}, {seconds:.0f} s", flush=True)


class Peer:
    def __init__(self, args, line):
        self.name, *words = shlex.split(line)
        self.args, self.prefix = args, os.path.join(args.state, self.name)
        self.command = [sys.executable, os.path.abspath(__file__), "torch", "--turn", self.prefix, "--lock",
                        args.lock] + words
        for what in ("ready", "go", "timed"):
            with contextlib.suppress(FileNotFoundError):
                os.remove(f"{self.prefix}.{what}")
        self.out, self.log = open(self.prefix + ".out", "w"), open(self.prefix + ".log", "w")
        print("\n==> " + self.name + ": " + shlex.join(self.command), file=self.log, flush=True)
        self.began, self.process = time.monotonic(), None

    def start(self):
        self.process = subprocess.Popen(self.command, stdin=subprocess.DEVNULL, stdout=self.out,
                                        stderr=self.log, start_new_session=True)

    def is_there(self, what):
        return os.path.exists(f"{self.prefix}.{what}")

    def running(self):
        return self.process.poll() is None

    def end(self, result=None):
        """Reports the result of the process, and ends the process if it still runs."""
        if self.process and self.running():
            with contextlib.suppress(ProcessLookupError):
                self.process.send_signal(signal.SIGUSR1)      # writes the current stack to the log
                time.sleep(0.2)
                os.killpg(self.process.pid, signal.SIGKILL)
        status = self.process.wait() if self.process else 0
        result = result or ("ok" if status == 0 else f"failed with status {status}")
        said(self.args.state, self.name, result, time.monotonic() - self.began, shlex.join(self.command))
        self.out.close()
        self.log.close()
        if os.path.getsize(self.prefix + ".out"):
            print("    " + in_short(self.prefix), flush=True)


def in_short(prefix):
    """Returns one line with the figures of a run and with warnings about launches that were not recorded."""
    with open(prefix + ".out") as f:
        rows = pytorch.rows_of(f.read())
    value = lambda name: rows[name]["value"] if name in rows else float("nan")
    step = lambda what: f"{value('time of a step' + what):.2f}"
    with open(prefix + ".log") as f:
        skipped = [line.strip() for line in f if "cudagraph" in line.lower() and "skip" in line.lower()]
    return (f"ms a step: median {step(', median')} least {step(', least')} mean {step(', mean')} GPU busy "
            f"{step(' that the GPU is busy')}; {value('tokens a second, mean'):.0f} tokens/s; "
            f"MB: tensors {value('memory of tensors at most'):.0f} device grew by "
            f"{value('device memory grew by'):.0f}; not recorded: "
            f"{value('graphs that were not recorded'):.0f}" + (f" ({skipped[0][:160]})" if skipped else ""))


def run_peers(args):
    """Starts a process `gpu.py torch` for each line of a list. At most --at-once of the processes compile at
    a time. The processes then measure one after another, in the order of the list. Measuring begins when all
    processes have compiled. After --compile seconds, measuring begins with the processes that have compiled
    by then. Writes the file of each stage when the stage ends."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("gpu.py: ended"))
    parent = os.getppid()
    began = time.monotonic()

    def since():
        if os.getppid() != parent:
            sys.exit("gpu.py: who started the peers has ended")
        return time.monotonic() - began
    with open(args.list) as f:
        waiting = [Peer(args, line) for line in f if line.strip()]
    closing = []      # peers that have measured and are writing their figures

    def start_more():
        compiling = sum(p.process is not None and p.running() and not p.is_there("ready") for p in waiting)
        for p in [p for p in waiting if p.process is None][:max(0, args.at_once - compiling)]:
            p.start()

    def all_are_ready():
        return all(p.process is not None and (p.is_there("ready") or not p.running()) for p in waiting)

    def close():
        for p in [p for p in closing if not p.running() or time.monotonic() > p.until]:
            p.end()
            closing.remove(p)
    try:
        while since() < args.compile and not all_are_ready():
            start_more()
            time.sleep(0.1)
        ready = sum(p.is_there("ready") for p in waiting)
        print(f"compiled: {ready} of {len(waiting)} after {since():.0f} s", flush=True)
        while args.after and not os.path.exists(args.after) and since() < args.limit:
            start_more()
            time.sleep(0.1)
        limit = max(args.limit - args.later, since() + 40)
        while waiting and since() < limit - 5:
            close()
            start_more()
            p = next((p for p in waiting if p.is_there("ready") or p.process is not None and not p.running()),
                     None)
            if not p:
                time.sleep(0.1)
                continue
            waiting.remove(p)
            open(p.prefix + ".go", "w").close()
            until = min(time.monotonic() + args.each, began + limit)
            while p.running() and not p.is_there("timed") and time.monotonic() < until:
                time.sleep(0.02)
            if p.running() and not p.is_there("timed"):
                p.end(f"ended after its {args.each:.0f} s")
            else:
                p.until = time.monotonic() + 25
                closing.append(p)
        while closing:
            close()
            time.sleep(0.02)
    finally:
        for p in closing + waiting:
            p.end("skipped: no time left" if p.process is None else
                  "ended: no time left" if p.is_there("ready") else "ended: not compiled in time")


# --------------------------------------------------------------------------------------------------- training
def run_training(args):
    """Runs examples/distilbert_imdb.c or bench/minilm_imdb.py, and reports how long the training took and the
    model's accuracy."""
    began = time.monotonic()
    out = subprocess.run(args.command, stdout=subprocess.PIPE, text=True)
    seconds = time.monotonic() - began
    print(out.stdout, file=sys.stderr)
    if out.returncode:
        sys.exit(f"gpu.py: '{shlex.join(args.command)}' ended with status {out.returncode}")
    last = lambda pattern: float(re.findall(pattern, out.stdout)[-1])
    if args.metrics:
        with open(args.metrics, newline="") as f:
            steps = sum(float(r["seconds"]) for r in csv.DictReader(f) if r["split"] == "train")
        accuracy = last(r"accuracy ([\d.]+), .* test texts")
        memory = last(r"memory plan for \w+: ([\d.]+) MB")
    else:
        steps, accuracy = last(r"training took ([\d.]+) s"), last(r"test accuracy ([\d.]+)")
        memory = last(r"memory of tensors at most (\d+) MB" if "MB\n" in out.stdout
                      else r"peak resident memory (\d+) MiB")
    report = pytorch.Report(True)
    for (what, unit), value in zip(TRAINED, (seconds, steps, 100 * accuracy, memory)):
        report.row(what, value, unit)


# ----------------------------------------------------------------------------------------------------- report
WHAT = {"vit": "ViT", "fixed": "DistilBERT", "imdb": "DistilBERT, IMDb lengths", "gpt2": "GPT-2"}
SIDES = {"tinytrain": "tinytrain", "tuned": "tinytrain, products timed (tune)",
         "none": "tinytrain, nothing recomputed", "nodrop": "tinytrain, no dropout",
         "nodrop_tuned": "tinytrain, no dropout, products timed (tune)",
         "eager": "PyTorch eager", "compile": "torch.compile", "reduce": "torch.compile, reduce-overhead",
         "nano": "plain PyTorch, compiled, 50,257, no dropout",
         "nano_dropout": "plain PyTorch, compiled, 50,257, dropout",
         "nano_dropout_reduce": "plain PyTorch, reduce-overhead, 50,257, dropout",
         "nano_padded": "plain PyTorch, compiled, 50,304, no dropout",
         "nano_padded_reduce": "plain PyTorch, reduce-overhead, 50,304, no dropout",
         "nano_padded_dropout": "plain PyTorch, compiled, 50,304, dropout"}
NO_DROPOUT = ("nano", "nano_padded", "nano_padded_reduce")
# The figures of a training that `gpu.py training` reports.
TRAINED = [("from its start to its end", "s"), ("training steps", "s"), ("accuracy on test reviews", "%"),
           ("memory", "MB")]
# If the GPU is busy for less than the share BUSY of a step's time, the GPU waits for its host.
BUSY = 0.85


def table(header, lines):
    number = lambda x: f"{x:.4g}" if abs(x) < 1000 else f"{x:.0f}"
    text = lambda x: "" if x is None else x if isinstance(x, str) else number(x)
    return (["| " + " | ".join(header) + " |", "| " + " | ".join("---" for _ in header) + " |"] +
            ["| " + " | ".join(map(text, line)) + " |" for line in lines])


def write_whole(path, text):
    """Writes the whole file or nothing, because the process may be killed."""
    with open(f"{path}.{os.getpid()}", "w") as f:
        f.write(text)
    os.replace(f.name, path)


def pairs(texts):
    return dict(t.split("=", 1) for t in texts)


def table_of_ops(measured):
    """Returns a table of a run of step --ops: the time of each op alone, beside the time that the op's bytes
    and FLOPs should take at 85% of the rate of copies and 60% of the rate of matrix products of the same
    GPU."""
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
    runs = [r for r in (tuple(name.split(".")) for name in measured) if len(r) == 3 and r[0] in WHAT]
    for what, precision in dict.fromkeys(r[:2] for r in runs):
        label = f"{WHAT[what]}, {shapes[what]}, {precision}"
        speeds = {side: value(f"{what}.{precision}.{side}", "tokens a second, mean") for side in SIDES}
        grown = lambda side: (value(f"{what}.{precision}.{side}", "device memory grew by") or
                              value(f"{what}.{precision}.{side}", "peak resident memory"))
        for side, who in SIDES.items():
            run, speed = f"{what}.{precision}.{side}", speeds[side]
            if not speed:
                continue
            millis, memory, ratio, of_peak = value(run, "time of a step, mean"), grown(side), None, None
            median = value(run, "time of a step, median")
            busy = value(run, "time of a step that the GPU is busy")
            own = max(("nodrop", "nodrop_tuned") if side in NO_DROPOUT else ("tinytrain", "tuned"),
                      key=lambda s: speeds[s] or 0)
            rate = measured[run].get("matmuls and attention, whole step, mean")
            planned = value(run, "planned memory")
            row(f"{label}, {who}: time of a step", millis, "ms")
            row(f"{label}, {who}: tokens a second", speed, "tokens/s")
            # With peak=millis, the row's of_peak is the share of a step's time in which the GPU is busy.
            if busy:
                row(f"{label}, {who}: the GPU is busy", busy, "ms", peak=millis)
            if rate:
                of = label if side == "tinytrain" else f"{label}, {who}"
                row(f"{of}: matmuls and attention", rate["value"], rate["unit"], peak=rate["peak"])
                row(f"{of}: memory planned", planned, "MB")
                row(f"{of}: memory measured beside the plan", memory, "MB", peer=planned)
                of_peak = (f"{rate['value']:.4g} {rate['unit']}" +
                           (f", {100 * rate['of_peak']:.1f}%" if rate["of_peak"] else ""))
            # `own_rate / ratio` is the number of FLOPs of tinytrain's step, divided by the time of the peer's
            # step.
            elif speeds[own]:
                ratio = speeds[own] / speed
                own_rate = value(f"{what}.{precision}.{own}", "matmuls and attention, whole step, mean")
                of_peak = f"{own_rate / ratio:.4g}" if own_rate else None
                row(f"{label}: tokens a second beside {who}", speeds[own], "tokens/s", peer=speed)
                row(f"{label}: memory measured beside {who}", grown(own), "MB", peer=memory)
            tensors = planned if rate else value(run, "memory of tensors at most")
            flops = value(run, "FLOPs of a step, mean")
            if flops:
                row(f"{label}, {who}: FLOPs of a step", flops, "TFLOP")
            waits = busy and busy < BUSY * millis
            lines.append([label, who, millis, median, f"{busy:.3g}{', waits for its host' * waits}" if busy
                          else None, f"{speed:.0f}", ratio, flops, of_peak, tensors, memory])

    trained = [[SIDES[name.split(".")[2]]] + [value(name, what) for what, _ in TRAINED]
               for name in measured if name.startswith("train.")]
    for who, *values in trained:
        for (what, unit), x in zip(TRAINED, values):
            if x is not None:
                row(f"DistilBERT from random weights on IMDb, bf16-mixed, {who}: {what}", x, unit)
    write_whole(args.to + ".json", json.dumps({**about, "stages": stages, "rows": rows}, indent=1) + "\n")
    text = ([f"# {about.get('gpu', 'GPU')}, {about.get('date', '')}", ""] +
            [f"- {k}: {f'`{v}`' if k == 'command' else v}" for k, v in about.items()])
    text += ["", "Memory in MB: `tensors` is what tinytrain planned, and the most that PyTorch's allocator "
             "had handed out; `measured` is by how much the device's memory in use grew, of PyTorch what its "
             "allocator took of it (without a GPU: the process's most). `ratio`: the tokens/s of tinytrain's "
             "faster row, with tune or without, over the peer's; where the peer has no dropout, of rows of "
             "tinytrain without. `GPU busy`: by torch.profiler, in some steps after those timed; where it is "
             "far less than a step takes, PyTorch waits for its host. The share is of cuBLASLt's products in "
             "the same process; peers are taken to do the FLOPs of that row of tinytrain's. TFLOP: of a "
             "step's matmuls and attention, with what is recomputed, as each side counts its own "
             "(torch.utils.flop_counter, in eager mode).", ""]
    columns = ["what", "side", "ms a step", "median", "GPU busy", "tokens/s", "ratio", "TFLOP",
               "matmuls and attention", "tensors", "measured"]
    text += table(columns, lines) if lines else ["Nothing was measured."]
    if trained:
        text += (["", "DistilBERT from the same random weights on IMDb, bf16-mixed; PyTorch pads and groups "
                  "by length, tinytrain has no padding:", ""] +
                 table(["side"] + [f"{what}, {unit}" for what, unit in TRAINED], trained))
    peaks = {name: r["value"] for name, r in measured.get("peaks", {}).items()}
    for name in [name for name in measured if ".ops_wgmma_" in name]:
        what, precision, side = name.split(".")
        attention = "by warpgroups" if side.endswith("1") else "by warps (TINYTRAIN_WGMMA=0)"
        peak = (measured[name].get("matmuls and attention, whole step, mean") or {}).get("peak")
        copies = peaks.get("copies of memory, bytes read and written")
        if peak and copies:
            text += (["", f"Each op by itself, {WHAT[what]}, {shapes[what]}, {precision}, attention "
                      f"{attention}:", ""] +
                     table_of_ops({"rows": measured[name], "copies": copies, "peak": peak}))
    if "peaks" in measured:
        text += ([""] +
                 table(["at most", "", ""],
                       [[name, r["value"], r["unit"]] for name, r in measured["peaks"].items()]))
    text += ([""] +
             table(["stage", "result", "s"], [[s["name"], s["result"], str(s["seconds"])] for s in stages]))
    write_whole(args.to + ".md", "\n".join(text) + "\n")
    print("\n".join(text))


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sub = p.add_subparsers(dest="what", required=True)
    b, t, r = (sub.add_parser(name) for name in ("batches", "torch", "report"))
    q = sub.add_parser("peers")
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
    t.add_argument("--turn", metavar="PREFIX", help="waits for PREFIX.go, see Turn")
    t.add_argument("--lock", metavar="FILE", help="locked (flock) while the GPU is used")
    t.add_argument("--nano", type=pytorch.positive, metavar="N", help="bench/nano_gpt.py with a vocabulary "
                   "of N")
    t.add_argument("--dropout", type=float, default=0.1, metavar="X", help="of --nano")
    t.add_argument("--whole", action="store_true", help="all sequences of a batch are as long: no masks")
    t.add_argument("--cache", metavar="FILE", help="what torch.compile compiled: read if it is there, else "
                   "written; for a GPU and a PyTorch of the same kind")
    t.add_argument("--dynamic", action="store_true", help="torch.compile for any length")
    t.add_argument("--vit", metavar="SIZE")
    t.add_argument("--gpt2", action="store_true")
    t.add_argument("--pixels", type=pytorch.positive, default=224)
    t.add_argument("--layers", type=pytorch.positive)
    t.add_argument("--threads", type=pytorch.positive, default=len(os.sched_getaffinity(0)))
    q.add_argument("--list", required=True, metavar="FILE", help="lines of a name and options of torch")
    q.add_argument("--state", required=True, metavar="DIR", help="for NAME.out, NAME.log and NAME.stage")
    q.add_argument("--lock", default="/tmp/gpu.lock", metavar="FILE")
    q.add_argument("--after", metavar="FILE", help="nothing is timed before it exists")
    q.add_argument("--at-once", type=pytorch.positive, default=max(1, (os.cpu_count() or 2) // 2),
                   metavar="N", help="processes that compile side by side (half as many as processors)")
    q.add_argument("--compile", type=float, default=240, metavar="N", help="seconds to compile")
    q.add_argument("--each", type=float, default=30, metavar="N", help="seconds to time each")
    q.add_argument("--later", type=float, default=0, metavar="N", help="seconds that are left for others")
    q.add_argument("--limit", type=float, default=500, metavar="N", help="seconds for all, with those")
    w = sub.add_parser("training")
    w.add_argument("--metrics", metavar="FILE", help="metrics.csv that tinytrain's example writes")
    w.add_argument("command", nargs="+")
    r.add_argument("--state", required=True, metavar="DIR")
    r.add_argument("--to", required=True, metavar="PREFIX")
    r.add_argument("--shapes", nargs="*", default=[], metavar="KIND=TEXT")
    r.add_argument("--about", nargs="*", default=[], metavar="NAME=TEXT")
    args = p.parse_args()
    return {"batches": batches, "torch": run_torch, "peers": run_peers,
            "training": run_training, "report": make_report}[args.what](args)


if __name__ == "__main__":
    main()
