#!/usr/bin/env python3
"""Draws four pictures in bench/results. speed.svg, from speed.json: time and peak memory of a training step
compared with PyTorch's, on each kind of CPU. ranks.svg, from ranks.json, which `build/memory_ladder --ranks 8
--json` prints: the memory of a rank by how ranks share the work. devices.svg, from devices.json, which
`build/ranks --only devices --json` prints: the time of a step by number of devices. gpu.svg, from the records
gpu_NAME_DATE.json, which bench/gpu.sh writes: time and memory of a training step on a GPU,
compared with PyTorch's.
Standard library only.

    python3 bench/chart.py             draws the pictures
    python3 bench/chart.py --tables    prints the lines and tables of README.md, docs/ and bench/README.md
    python3 bench/chart.py --add ROWS --cpu 'Intel Xeon' --isa 'AVX-512, AMX' --commit 053f6e9 \\
                           --command 'bench/pytorch.py step --rounds 5 --compile'
                                       adds the lines that `bench/pytorch.py ... --json` printed to
                                       speed.json, in place of older records of the same measurements,
                                       and draws the pictures

speed.json is a list of records, one a line. Their keys:
    task                              step, imdb, epoch or gemm, as in bench/pytorch.py; lm and generate, as
                                      in bench/lm.py; gpt2: bench/peers
    model, shape, precision, cpu      what was trained, and on which CPU; isa: the instructions that tell
                                      CPUs apart
    vs                                the peer that tinytrain is compared with
    unit, speed, peer_speed           the speeds of tinytrain and of the peer
    speed_ratio                       how many times as fast tinytrain is
    mb, peer_mb, memory_ratio         peak resident memory, and tinytrain's share of the peer's
    commit, date, command             where the figure comes from
A value is null where it was not kept or not measured. Both sides use two threads and do a step each in
turn."""
import argparse
import datetime
import glob
import json
import os
import re
import sys
from xml.sax.saxutils import escape

import gpu

RESULTS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "results")
RECORDS, PICTURE = os.path.join(RESULTS, "speed.json"), os.path.join(RESULTS, "speed.svg")
DEVICES, DEVICES_PICTURE = os.path.join(RESULTS, "devices.json"), os.path.join(RESULTS, "devices.svg")
GPU_PICTURE = os.path.join(RESULTS, "gpu.svg")
RANKS, RANKS_PICTURE = os.path.join(RESULTS, "ranks.json"), os.path.join(RESULTS, "ranks.svg")
KEYS = ["task", "model", "shape", "precision", "cpu", "isa", "vs", "unit", "speed", "peer_speed",
        "speed_ratio", "mb", "peer_mb", "memory_ratio", "commit", "date", "command"]
SAME = KEYS[:7]      # the keys that tell one measurement from another
TASKS = {"step": "training step", "imdb": "steps on IMDb", "epoch": "an epoch, from process start to end",
         "gemm": "matrix products", "gpt2": "training step", "lm": "training step", "generate": "generation"}
PRECISIONS = {"32-true": "fp32", "bf16-mixed": "bf16-mixed", "bf16-true": "bf16-true"}
CPUS = ["AMD Zen 3", "AMD Zen 4", "Intel Xeon"]
PEERS = ["PyTorch eager", "torch.compile", "PyTorch", "OpenBLAS", "oneDNN"]


# ------------------------------------------------------------------------------------------------ records
def read():
    with open(RECORDS, encoding="utf-8") as f:
        return json.load(f)


def write(records):
    with open(RECORDS, "w", encoding="utf-8") as f:
        f.write("[\n" + ",\n".join(json.dumps(r) for r in records) + "\n]\n")


def key(record):
    return tuple(record[k] for k in SAME)


def order(record):
    """Returns the sort key of a record: the order in the file, the picture and the table."""
    def rank(x, of):
        return (of.index(x) if x in of else len(of), x)
    return (rank(record["task"], list(TASKS)), record["model"], record["shape"],
            rank(record["precision"], list(PRECISIONS)), rank(record["cpu"], CPUS), rank(record["vs"], PEERS))


def what_of(name, command):
    """Returns (task, model, shape, precision, vs) of a row of pytorch.py or lm.py, or None for a row that is
    not kept."""
    m = re.fullmatch(r"(\d+ x \d+|\d+ images of \d+ x \d+), ([\w-]+), PyTorch [\w ]+?( compiled)?", name)
    if m:
        vit, vs = re.search(r"--vit (\S+)", command), "torch.compile" if m[3] else "PyTorch eager"
        model, shape = ("ViT-" + vit[1], m[1]) if vit else ("DistilBERT-base", m[1] + " tokens")
        return "step", model, shape, m[2], vs
    m = re.fullmatch(r"imdb, (random order|grouped by length), ([\w-]+), PyTorch [\w ]+", name)
    if m:
        return "imdb", "DistilBERT-base", "16 reviews, " + m[1], m[2], "PyTorch eager"
    m = re.fullmatch(r"GPT-2, (\d+ x \d+), ([\w-]+), PyTorch [\w ]+", name)
    if m:
        return "lm", "GPT-2", m[1] + " tokens", m[2], "PyTorch eager"
    m = re.fullmatch(r"GPT-2, (\d+ tokens behind \d+), ([\w-]+), (transformers|llama.cpp f\d+)", name)
    if m:
        return "generate", "GPT-2", m[1], m[2], m[3]
    if name == "epoch of MiniLM on IMDb, by wall time":
        return "epoch", "MiniLM", "1,000 reviews", "32-true", "PyTorch eager"
    m = re.fullmatch(r"([\w-]+): all of these, by flops, (PyTorch|OpenBLAS|oneDNN)", name)
    return ("gemm", "layers of DistilBERT-base and ViT-L", "forward, dX, dW", m[1], m[2]) if m else None


def short(x):
    """Rounds to three digits or to a whole number: further digits are noise on a shared machine."""
    return float(f"{x:.3g}") if x < 1000 else round(x)


def add(path, args):
    new = {}
    with open(path, encoding="utf-8") as f:
        rows = [json.loads(line) for line in f if line.startswith("{")]
    for row in rows:
        name, memory = re.fullmatch(r"(.*?)(, memory)?", row["name"]).groups()
        what = what_of(name, args.command)
        if not what or row["peer"] is None:
            continue
        record = dict.fromkeys(KEYS)
        record.update(zip(SAME, (*what[:4], args.cpu, args.isa, what[4])))
        record = new.setdefault(key(record), record)
        value, peer, ratio = short(row["value"]), short(row["peer"]), round(row["ratio"], 2)
        if memory:
            record.update(mb=value, peer_mb=peer, memory_ratio=ratio)
        else:
            record.update(unit=row["unit"], speed=value, peer_speed=peer, speed_ratio=ratio)
        record.update(commit=args.commit, date=args.date, command=args.command)
    if not new:
        sys.exit(f"chart.py: {path} has no row that is kept")
    write(sorted([r for r in read() if key(r) not in new] + list(new.values()), key=order))
    print(f"{len(new)} records from {path}")


# ------------------------------------------------------------------------------------------------ picture
INK, QUIET, OURS, THEIRS = "#1f2328", "#59636e", "#0969da", "#d8dee4"
WIDTH, BAR, ROW, TOP = 720, 160, 24, 78
LEFT, RIGHT = 154, 428      # x at which the bars of each panel begin


def charted(records):
    """Returns the rows of the picture, in groups: [(heading, records)]."""
    groups = {}
    for r in records:
        if r["task"] == "step" and r["vs"] == "PyTorch eager" and r["precision"] in ("32-true", "bf16-mixed"):
            groups.setdefault(f"{r['model']}, {r['shape']}", []).append(r)
    return [(heading, sorted(rows, key=lambda r: CPUS.index(r["cpu"]))) for heading, rows in groups.items()]


def text(x, y, words, size=12, fill=INK, bold=False, anchor="start"):
    weight = ' font-weight="600"' if bold else ""
    return (f'<text x="{x}" y="{y}" font-size="{size}" fill="{fill}"{weight} text-anchor="{anchor}">'
            f"{words}</text>")


def bar(x, y, width, fill):
    return f'<rect x="{x}" y="{y}" width="{width:.1f}" height="14" rx="2" fill="{fill}"/>'


def framed(title, height, out):
    """Returns an SVG picture with the elements `out`."""
    font = "-apple-system, 'Segoe UI', 'Noto Sans', Helvetica, Arial, sans-serif"
    head = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
            f'viewBox="0 0 {WIDTH} {height}" role="img" font-family="{font}">',
            f"<title>{title}</title>", f'<rect width="{WIDTH}" height="{height}" rx="6" fill="#ffffff"/>']
    return "\n".join(head + out + ["</svg>"]) + "\n"


def picture(records):
    title = "Time and peak memory of a training step, compared with PyTorch's"
    note = "Two cores of each CPU; PyTorch 2.15 eager, in turn on the same machine. Shorter bars are better."
    out, y = [], TOP
    for x, heading in ((LEFT, "Time of a training step"), (RIGHT, "Peak memory")):
        out += [text(x, 28, heading, 14, bold=True), bar(x, 38, 14, OURS), text(x + 20, 50, "tinytrain"),
                bar(x + 90, 38, 14, THEIRS), text(x + 110, 50, "PyTorch = 1")]
    for heading, rows in charted(records):
        out.append(text(20, y + 4, escape(heading), bold=True))
        y += 12
        for r in rows:
            name = escape(f"{r['cpu']}, {PRECISIONS[r['precision']]}")
            out.append(text(LEFT - 12, y + 12, name, fill=QUIET, anchor="end"))
            speed, memory = r["speed_ratio"], r["memory_ratio"]
            for x, share, number, words in ((LEFT, 1 / speed, f"{speed:.2f}×", "as fast"),
                                            (RIGHT, memory, f"{memory:.2f}", "of the memory")):
                out += [bar(x, y + 1, BAR, THEIRS), bar(x, y + 1, BAR * share, OURS)]
                out.append(text(x + BAR + 8, y + 12, f'<tspan font-weight="600">{number}</tspan> {words}'))
            y += ROW
        y += 22
    out.append(text(20, y + 2, note, 11, fill=QUIET))
    return framed(title, y + 18, out)


def read_gpu():
    """Returns the newest record that bench/gpu.sh wrote. If the newest record lacks rows of PyTorch, older
    records of the same GPU give these rows. Each row gets the date of its record."""
    records = sorted((json.loads(open(path, encoding="utf-8").read()) for path in
                      glob.glob(os.path.join(RESULTS, "gpu_*.json"))), key=lambda record: record["date"])
    newest, rows = records[-1], {}
    theirs = [who for who in gpu.SIDES.values() if not who.startswith("tinytrain")]
    for record in (r for r in records if r["gpu"] == newest["gpu"]):
        for row in record["rows"]:
            if record is newest or any(who in row["name"] for who in theirs):
                rows[row["name"]] = {**row, "date": record["date"]}
    return {**newest, "rows": list(rows.values())}


# The picture of a GPU compares sides of gpu.SIDES that do equal work: all train with dropout, or all without.
# A tuple of GPU_WORK has three elements: the words that end a heading of the picture; the sides of tinytrain;
# and the sides of PyTorch that are compiled. The picture shows all of tinytrain's sides, the fastest of
# PyTorch's compiled sides and, for the work with dropout, also eager PyTorch.
GPU_WORK = [("", ("tinytrain", "tuned"),
             ("compile", "reduce", "nano_dropout", "nano_dropout_reduce", "nano_padded_dropout")),
            (", without dropout", ("nodrop", "nodrop_tuned"), ("nano", "nano_padded", "nano_padded_reduce"))]
GPU_MODELS = {"vit": "ViT-", "fixed": "DistilBERT, ", "gpt2": "GPT-2, "}
GPU_LEFT, GPU_RIGHT, GPU_BAR = 228, 496, 150


def gpu_groups(record):
    """Returns [(heading, [(side, is it tinytrain's?, ms, MB, does the GPU wait for its host?, date)])] of the
    record that read_gpu returns."""
    value = {r["name"]: r for r in record["rows"]}
    labels = dict.fromkeys(name[:-len(", tinytrain: time of a step")] for name in value
                           if name.endswith(", tinytrain: time of a step"))
    groups = []

    def row(label, side, ours):
        who = gpu.SIDES[side]
        of = label if side == "tinytrain" else f"{label}, {who}"
        time = value.get(f"{label}, {who}: time of a step")
        memory = value.get(f"{of}: memory measured beside the plan" if ours
                           else f"{label}: memory measured beside {who}")
        if not time or not memory:
            return None
        busy = value.get(f"{label}, {who}: the GPU is busy")
        waits = bool(busy) and busy["of_peak"] < gpu.BUSY
        megabytes = memory["value" if ours else "peer"]
        return who.replace(", no dropout", ""), ours, time["value"], megabytes, waits, time["date"]
    for label in labels:
        kind = next((k for k in GPU_MODELS if label.startswith(gpu.WHAT[k] + ", ")), None)
        if not kind or label.startswith(gpu.WHAT["imdb"]):
            continue
        for work, ours, compiled in GPU_WORK:
            mine = [r for r in (row(label, side, True) for side in ours) if r]
            peers = [r for r in (row(label, side, False) for side in compiled) if r]
            rows = mine + sorted(peers, key=lambda r: r[2])[:1]
            rows += [r for r in [row(label, "eager", False)] if r and not work]
            if mine and len(rows) > len(mine):
                name = GPU_MODELS[kind] + label[len(gpu.WHAT[kind]) + 2:]
                groups.append((name + work, rows))
    return groups


def gpu_picture(record):
    title = f"Time and memory of a training step on an {record['gpu']}, compared with PyTorch's"
    out, y = [], TOP
    for x, heading in ((GPU_LEFT, "Time of a training step"), (GPU_RIGHT, "Memory of the GPU")):
        out += [text(x, 28, heading, 14, bold=True), bar(x, 38, 14, OURS), text(x + 20, 50, "tinytrain"),
                bar(x + 90, 38, 14, THEIRS), text(x + 110, 50, "PyTorch")]
    some_wait, older = False, set()
    for heading, rows in gpu_groups(record):
        out.append(text(20, y + 4, escape(heading), bold=True))
        y += 12
        most = [max(r[k] for r in rows) for k in (2, 3)]
        for who, ours, time, memory, waits, date in rows:
            some_wait = some_wait or waits
            if date != record["date"]:
                older.add(date)
            name = re.sub(", (no )?dropout$", "", who).replace("plain PyTorch", "plain")
            name += "*" * waits + "°" * (date != record["date"])
            out.append(text(GPU_LEFT - 12, y + 12, escape(name), 11, fill=QUIET, anchor="end"))
            for x, amount, all_of, words in ((GPU_LEFT, time, most[0], f"{short(time):g}</tspan> ms"),
                                             (GPU_RIGHT, memory, most[1], f"{memory / 1e3:.1f}</tspan> GB")):
                width = GPU_BAR * amount / all_of
                out += [bar(x, y + 1, width, OURS if ours else THEIRS),
                        text(f"{x + width + 6:.1f}", y + 12, '<tspan font-weight="600">' + words)]
            y += 20
        y += 22
    peers = re.match(r"PyTorch [\d.]+", record["peers"])
    notes = [f"{record['gpu']}, {record['date']}, commit {record['revision']}; "
             f"{peers[0] if peers else 'PyTorch'}; of its compiled variants the fastest. Shorter bars are "
             "better."]
    notes += ["* The GPU waits for its host: the time is that of PyTorch's Python."] * some_wait
    notes += [f"° measured on another machine with the same GPU, {', '.join(sorted(older))}."] * bool(older)
    plain = any(row[0].startswith("plain") for _, rows in gpu_groups(record) for row in rows)
    notes += ["plain: GPT-2 in one file of PyTorch, with a vocabulary of 50,257 or padded to 50,304."] * plain
    notes += record.get("notes", [])
    for k, note in enumerate(notes):
        out.append(text(20, y + 2 + 16 * k, escape(note), 11, fill=QUIET))
    return framed(title, y + 2 + 16 * len(notes), out)


# The bars of the picture of ranks consist of PARTS: categories of a plan, in the colours of tt_plan_svg.
# Dashed lines show the memory of cards, in GB.
PARTS = [("parameters", "#4e79a7"), ("optimizer", "#a0cbe8"), ("gradients", "#f28e2b"),
         ("activations", "#59a14f")]
CARDS = (24, 80)
PANEL, LABELS, LENGTH = 346, 112, 164     # pixels: widths of a panel, of its labels and of its longest bar


def ranks_panel(x, rows):
    """Returns the bars of one model and the y at which they end."""
    out = [text(x, 28, escape(rows[0]["model"]), 14, bold=True),
           text(x, 45, escape(rows[0]["what"]), 12, fill=QUIET)]
    most, bars, end = max(r["planned_bytes"] for r in rows), x + LABELS, 94 + ROW * len(rows)
    for card in (c for c in CARDS if most / 1e9 / 8 < c < most / 1e9):
        at = bars + LENGTH * card * 1e9 / most
        out += [f'<path stroke="{QUIET}" stroke-dasharray="3 3" d="M{at:.1f} 88V{end - 2}"/>',
                text(f"{at:.1f}", 84, f"{card} GB card", 11, fill=QUIET, anchor="middle")]
    for y, r in zip(range(94, end, ROW), rows):
        out.append(text(bars - 8, y + 11, escape(r["strategy"]), fill=QUIET, anchor="end"))
        left = float(bars)
        for name, fill in PARTS:
            width = LENGTH * r[name] / most
            out.append(f'<rect x="{left:.1f}" y="{y}" width="{width:.1f}" height="15" fill="{fill}"/>')
            left += width
        words = f'<tspan font-weight="600">{r["planned_bytes"] / 1e9:.2f}</tspan> GB'
        number = f"{bars + LENGTH * r['planned_bytes'] / most + 6:.1f}", y + 12, words
        halo = text(*number, fill="#ffffff").replace("<text ", '<text stroke="#ffffff" stroke-width="5" ', 1)
        # the white outline `halo` keeps the dashed lines of cards from crossing the number
        out += [halo, text(*number)]
    return out, end


def ranks_picture(rows):
    models = list(dict.fromkeys(r["model"] for r in rows))
    out, end, x = [], 0, 20
    for name, fill in PARTS:
        out += [f'<rect x="{x}" y="57" width="12" height="12" fill="{fill}"/>', text(x + 18, 67, name)]
        x += 38 + 7 * len(name)
    for k, model in enumerate(models):
        panel, end = ranks_panel(20 + k * PANEL, [r for r in rows if r["model"] == model])
        out += panel
    note = (f"Planned for each of {rows[0]['ranks']} GPUs; Adam, blocks recomputed. Bars show what lives at "
            "the peak, numbers are the whole plan.")
    out.append(text(20, end + 16, note, 11, fill=QUIET))
    return framed("Memory of a rank by how ranks share the work", end + 32, out)


def devices_picture(rows):
    """Draws the step time by number of devices, with a line for each link."""
    left, top, wide, high, lines = 70, 70, WIDTH - 250, 240, {}
    for r in rows:
        model, devices, link = re.fullmatch(r"(.+), (\d+) H200, (.+)", r["name"]).groups()
        lines.setdefault(link, []).append((int(devices), r["value"]))
    most = max(value for line in lines.values() for _, value in line)
    step = 500
    full = step * (int(most / step) + 1)
    numbers = [devices for devices, _ in next(iter(lines.values()))]

    def at(devices, value):
        return (left + wide * numbers.index(devices) / (len(numbers) - 1), top + high * (1 - value / full))
    title = f"{model} language model: ms a step by number of H200s, in machines of 8"
    what = "replayed; 4 stages x 2 data ranks a machine, ZeRO 1, 16 texts of 2048 tokens a data rank and step"
    out = [text(20, 28, title, 14, bold=True), text(20, 45, what, 12, fill=QUIET)]
    for value in range(0, full + 1, step):
        y = at(numbers[0], value)[1]
        out += [f'<path stroke="#e2e2e2" d="M{left} {y:.1f}h{wide}"/>',
                text(left - 8, f"{y + 4:.1f}", value, 11, fill=QUIET, anchor="end")]
    for devices in numbers:
        x = f"{at(devices, 0)[0]:.1f}"
        out.append(text(x, top + high + 18, devices, 11, fill=QUIET, anchor="middle"))
    for (link, line), fill in zip(lines.items(), (PARTS[2][1], PARTS[0][1])):
        points = "L".join(f"{x:.1f} {y:.1f}" for x, y in (at(*p) for p in line))
        x, y = at(*line[-1])
        out += [f'<path fill="none" stroke="{fill}" stroke-width="2" d="M{points}"/>',
                text(f"{x + 8:.1f}", f"{y + 4:.1f}", escape(link), 11, fill=fill)]
    return framed("Step time by number of devices", top + high + 36, out)


def ranks_summary(rows):
    """Returns the table of docs/several-devices.md: GB of each rank."""
    shown = ("one device", "ZeRO 1", "ZeRO 3")
    heads = ["GB of each rank", shown[0]] + [f"{rows[0]['ranks']} devices, {name}" for name in shown[1:]]
    cells = []
    for model in dict.fromkeys(r["model"] for r in rows):
        gb = {r["strategy"]: f"{r['planned_bytes'] / 1e9:.2f}" for r in rows if r["model"] == model}
        what = next(r["what"] for r in rows if r["model"] == model)
        cells.append([f"{model}, {what}"] + [gb[name] for name in shown])
    return "".join("| " + " | ".join(row) + " |\n" for row in [heads, ["---"] * len(heads)] + cells)


def ranks_table(rows):
    """Returns bench/README.md's table of ranks."""
    heads = ["model", "strategy", "GB a rank", "GB moved a step and rank", "at least"]
    cells = [[f"{r['model']}, {r['what']}", r["strategy"]] +
             [f"{r[k] / 1e9:.2f}" for k in ("planned_bytes", "moved_bytes", "least_bytes")] for r in rows]
    return "".join("| " + " | ".join(row) + " |\n" for row in [heads, ["---"] * len(heads)] + cells)


def replay_table(rows):
    """Returns bench/README.md's table of the rows that `build/ranks --only replay --json` printed."""
    cells, heads = {}, ["GPUs, link", "model"]
    for r in rows:
        name = re.fullmatch(r"(.+?): (.+?), ((?:zero|server|tensor).*)", r["name"])
        machine, model, strategy = name.groups()
        heads += [] if strategy in heads else [strategy]
        cells.setdefault((machine, model), []).append(f"{100 * r['of_peak']:.0f}% of {short(r['peak']):g} ms")
    lines = [heads, ["---"] * len(heads)] + [[*what, *row] for what, row in cells.items()]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def offload_table(rows):
    """Returns bench/README.md's table of the rows that `build/ranks --only offload --json` printed."""
    cells, heads = {}, ["ViT-L/16, 64 images"]
    for r in rows:
        machine, what = r["name"].split(": ", 1)
        if ', updates ' not in what:
            continue
        heads += [] if machine in heads else [machine]
        least = 100 * (r["peer"] or 0) / r["peak"]
        share = f"{100 * r['of_peak']:.0f}% of {short(r['peak']):g} ms ({least:.0f}%)"
        cells.setdefault(what, []).append(share)
    lines = [heads, ["---"] * len(heads)] + [[what, *row] for what, row in cells.items()]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def read_lines(path):
    with open(path, encoding="utf-8") as f:
        return [json.loads(line) for line in f]


def read_ranks():
    return read_lines(RANKS)


# ------------------------------------------------------------------------------------------------- tables
def gain(records):
    def span(name):
        least, most = (f"{f(r[name] for r in records):.2f}" for f in (min, max))
        return least if least == most else f"{least} to {most}"
    return f"{span('speed_ratio')} times as fast, in {span('memory_ratio')} of the memory"


def summary(records):
    """Returns README.md's lines below the picture: the picture's rows, compared with torch.compile, too."""
    lines = []
    for heading, rows in charted(records):
        drawn = {key(r)[:-1] for r in rows}
        compiled = [r for r in records if r["vs"] == "torch.compile" and key(r)[:-1] in drawn]
        end = f"; compared with torch.compile {gain(compiled)}." if compiled else "."
        lines.append(f"- {heading}: {gain(rows)}{end}")
    return "\n".join(lines) + "\n"


def table(records):
    """Returns bench/README.md's table of all records."""
    def cell(x, digits=None):
        return "" if x is None else f"{x:.{digits}f}" if digits else f"{x:g}"
    heads = ["what", "precision", "CPU", "compared with", "unit", "tinytrain", "other", "times as fast", "MB",
             "other's MB", "share of memory", "commit, date", "command"]
    rows = [[f"{TASKS[r['task']]}: {r['model']}, {r['shape']}", PRECISIONS[r["precision"]], r["cpu"], r["vs"],
             r["unit"], cell(r["speed"]), cell(r["peer_speed"]), cell(r["speed_ratio"], 2), cell(r["mb"]),
             cell(r["peer_mb"]), cell(r["memory_ratio"], 2), f"{r['commit']}, {r['date']}",
             f"`{r['command']}`"] for r in records]
    return "".join("| " + " | ".join(row) + " |\n" for row in [heads, ["---"] * len(heads)] + rows)


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--tables", action="store_true",
                   help="print what README.md, docs/ and bench/README.md show of the records")
    p.add_argument("--replay", metavar="ROWS",
                   help="print the table of what build/ranks --only replay --json, or offload, printed")
    p.add_argument("--add", metavar="ROWS", help="file of lines that bench/pytorch.py --json printed")
    for name in ("--cpu", "--isa", "--commit", "--command"):
        p.add_argument(name, help="of the added rows")
    p.add_argument("--date", default=datetime.date.today().isoformat(), help="of the added rows (today)")
    args = p.parse_args()
    if args.add and not all((args.cpu, args.isa, args.commit, args.command)):
        p.error("--add needs --cpu, --isa, --commit and --command")
    if args.replay:
        with open(args.replay, encoding="utf-8") as f:
            rows = [json.loads(line) for line in f]
        print(offload_table(rows) if ", updates " in rows[0]["name"] else replay_table(rows), end="")
        return
    if args.tables:
        ranks = read_ranks()
        print("\n".join((summary(read()), table(read()), ranks_summary(ranks), ranks_table(ranks))), end="")
        return
    if args.add:
        add(args.add, args)
    for path, drawn in ((PICTURE, picture(read())), (RANKS_PICTURE, ranks_picture(read_ranks())),
                        (DEVICES_PICTURE, devices_picture(read_lines(DEVICES))),
                        (GPU_PICTURE, gpu_picture(read_gpu()))):
        with open(path, "w", encoding="utf-8") as f:
            f.write(drawn)


if __name__ == "__main__":
    main()
