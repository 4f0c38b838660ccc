#!/usr/bin/env python3
"""Draws bench/results/speed.svg from bench/results/speed.json: time and peak memory of a training step beside
PyTorch's, on each kind of CPU. Standard library only.

    python3 bench/chart.py             draws the picture
    python3 bench/chart.py --tables    prints README.md's lines below the picture, and bench/README.md's table
    python3 bench/chart.py --add ROWS --cpu 'Intel Xeon' --isa 'AVX-512, AMX' --commit 053f6e9 \\
                           --command 'bench/pytorch.py step --rounds 5 --compile'
                                       takes the lines that `bench/pytorch.py ... --json` printed into
                                       speed.json, in place of those of the same measurement, and draws

speed.json is a list of records, one a line. Their keys:
    task                              step, imdb, epoch or gemm, as in bench/pytorch.py; gpt2: bench/peers
    model, shape, precision, cpu      what was trained, and where; isa: the instructions that tell CPUs apart
    vs                                what stands beside tinytrain
    unit, speed, peer_speed           of tinytrain and of the other
    speed_ratio                       how many times as fast tinytrain is
    mb, peer_mb, memory_ratio         peak resident memory, and tinytrain's share of the other's
    commit, date, command             where the figure comes from
A value is null where it was not kept or not measured. Both sides use two threads and do a step each in
turn."""
import argparse
import datetime
import json
import os
import re
import sys
from xml.sax.saxutils import escape

RESULTS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "results")
RECORDS, PICTURE = os.path.join(RESULTS, "speed.json"), os.path.join(RESULTS, "speed.svg")
KEYS = ["task", "model", "shape", "precision", "cpu", "isa", "vs", "unit", "speed", "peer_speed",
        "speed_ratio", "mb", "peer_mb", "memory_ratio", "commit", "date", "command"]
SAME = KEYS[:7]      # what tells one measurement from another
TASKS = {"step": "training step", "imdb": "steps on IMDb", "epoch": "an epoch, from process start to end",
         "gemm": "matrix products", "gpt2": "training step"}
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
    """of the records in the file, which is their order in the picture and in the table too"""
    def rank(x, of):
        return (of.index(x) if x in of else len(of), x)
    return (rank(record["task"], list(TASKS)), record["model"], record["shape"],
            rank(record["precision"], list(PRECISIONS)), rank(record["cpu"], CPUS), rank(record["vs"], PEERS))


def what_of(name, command):
    """(task, model, shape, precision, vs) of a row of bench/pytorch.py, or None for a row that is not kept"""
    m = re.fullmatch(r"(\d+ x \d+|\d+ images of \d+ x \d+), ([\w-]+), PyTorch [\w ]+?( compiled)?", name)
    if m:
        vit, vs = re.search(r"--vit (\S+)", command), "torch.compile" if m[3] else "PyTorch eager"
        model, shape = ("ViT-" + vit[1], m[1]) if vit else ("DistilBERT-base", m[1] + " tokens")
        return "step", model, shape, m[2], vs
    m = re.fullmatch(r"imdb, (random order|grouped by length), ([\w-]+), PyTorch [\w ]+", name)
    if m:
        return "imdb", "DistilBERT-base", "16 reviews, " + m[1], m[2], "PyTorch eager"
    if name == "epoch of MiniLM on IMDb, by wall time":
        return "epoch", "MiniLM", "1,000 reviews", "32-true", "PyTorch eager"
    m = re.fullmatch(r"([\w-]+): all of these, by flops, (PyTorch|OpenBLAS|oneDNN)", name)
    return ("gemm", "layers of DistilBERT-base and ViT-L", "forward, dX, dW", m[1], m[2]) if m else None


def short(x):
    """three digits or a whole number: a shared machine does not repeat more"""
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
LEFT, RIGHT = 154, 428      # where the bars of each panel begin


def charted(records):
    """the rows of the picture, in groups: [(heading, records)]"""
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


def picture(records):
    title = "Time and peak memory of a training step beside PyTorch's"
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
    height, font = y + 18, "-apple-system, 'Segoe UI', 'Noto Sans', Helvetica, Arial, sans-serif"
    head = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
            f'viewBox="0 0 {WIDTH} {height}" role="img" font-family="{font}">',
            f"<title>{title}</title>", f'<rect width="{WIDTH}" height="{height}" rx="6" fill="#ffffff"/>']
    return "\n".join(head + out + ["</svg>"]) + "\n"


# ------------------------------------------------------------------------------------------------- tables
def gain(records):
    def span(name):
        least, most = (f"{f(r[name] for r in records):.2f}" for f in (min, max))
        return least if least == most else f"{least} to {most}"
    return f"{span('speed_ratio')} times as fast, in {span('memory_ratio')} of the memory"


def summary(records):
    """README.md's lines below the picture: its rows, also beside torch.compile where that was measured"""
    lines = []
    for heading, rows in charted(records):
        drawn = {key(r)[:-1] for r in rows}
        compiled = [r for r in records if r["vs"] == "torch.compile" and key(r)[:-1] in drawn]
        end = f"; beside torch.compile {gain(compiled)}." if compiled else "."
        lines.append(f"- {heading}: {gain(rows)}{end}")
    return "\n".join(lines) + "\n"


def table(records):
    """bench/README.md's table: all records"""
    def cell(x, digits=None):
        return "" if x is None else f"{x:.{digits}f}" if digits else f"{x:g}"
    heads = ["what", "precision", "CPU", "beside", "unit", "tinytrain", "other", "times as fast", "MB",
             "other's MB", "share of memory", "commit, date", "command"]
    rows = [[f"{TASKS[r['task']]}: {r['model']}, {r['shape']}", PRECISIONS[r["precision"]], r["cpu"], r["vs"],
             r["unit"], cell(r["speed"]), cell(r["peer_speed"]), cell(r["speed_ratio"], 2), cell(r["mb"]),
             cell(r["peer_mb"]), cell(r["memory_ratio"], 2), f"{r['commit']}, {r['date']}",
             f"`{r['command']}`"] for r in records]
    return "".join("| " + " | ".join(row) + " |\n" for row in [heads, ["---"] * len(heads)] + rows)


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--tables", action="store_true", help="print what the READMEs show of the records")
    p.add_argument("--add", metavar="ROWS", help="file of lines that bench/pytorch.py --json printed")
    for name in ("--cpu", "--isa", "--commit", "--command"):
        p.add_argument(name, help="of the added rows")
    p.add_argument("--date", default=datetime.date.today().isoformat(), help="of the added rows (today)")
    args = p.parse_args()
    if args.add and not all((args.cpu, args.isa, args.commit, args.command)):
        p.error("--add needs --cpu, --isa, --commit and --command")
    if args.tables:
        print(summary(read()) + "\n" + table(read()), end="")
        return
    if args.add:
        add(args.add, args)
    with open(PICTURE, "w", encoding="utf-8") as f:
        f.write(picture(read()))


if __name__ == "__main__":
    main()
