#!/usr/bin/env python3
"""Checks that shown figures equal the committed or planned figures. bench/chart.py must draw the pictures
in bench/results from the records there. README.md, docs/ and bench/README.md must show the tables of
bench/chart.py. The records must be consistent, and bench/chart.py must accept the lines of
bench/pytorch.py. If memory_ladder is built, checks that it prints the tables of planned memory and
ranks.json. Standard library only; run from the repository's root.

    python3 tests/check_figures.py           B: folder of the built benchmarks (build), from the environment
"""
import glob
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile

sys.dont_write_bytecode = True
sys.path.insert(0, "bench")
import chart      # noqa: E402

B = os.environ.get("B", "build")
MEMORY, DEVICES = "docs/memory-and-budgets.md", "docs/several-devices.md"
failed = passed = 0


def check(name, wrong):
    global failed, passed
    failed, passed = failed + bool(wrong), passed + (not wrong)
    print(f"FAILED {name}: {'; '.join(wrong[:3])}" if wrong else f"ok {name}", flush=True)


def text_of(path):
    with open(path, encoding="utf-8") as f:
        return f.read()


def rows_of(path, head):
    """Returns the cells of the table whose first line begins with `head`, without the two header lines."""
    lines = text_of(path).splitlines()
    at = next((k for k, line in enumerate(lines) if line.startswith(head)), None)
    rows = []
    while at is not None and at < len(lines) and lines[at].startswith("|"):
        rows.append([cell.strip() for cell in lines[at].strip("|").split("|")])
        at += 1
    return rows[2:]


def record_wrong(r):
    """Returns the error in a record of speed.json, or None."""
    if list(r) != chart.KEYS:
        return f"not the keys {chart.KEYS}: {r}"
    if not re.fullmatch(r"[0-9a-f]{7}", r["commit"]) or not re.fullmatch(r"\d{4}-\d\d-\d\d", r["date"]):
        return f"commit or date: {r}"
    for mine, peer, ratio in (("speed", "peer_speed", "speed_ratio"), ("mb", "peer_mb", "memory_ratio")):
        # All three numbers are rounded, so the quotient is not exact.
        if r[mine] and r[peer] and not abs(r[mine] / r[peer] - r[ratio]) <= 0.006 + 0.015 * r[ratio]:
            return f"{ratio} is not {mine} / {peer}: {r}"
    return None


def check_added():
    """Runs --add in a copy of bench/: a new figure must replace the old one, and the picture must show it."""
    row = {"name": "8 x 256, 32-true, PyTorch fp32", "value": 900.0, "unit": "tokens/s", "peer": 300.0,
           "ratio": 3}
    rows = [row, dict(row, name=row["name"] + ", memory", value=1000.0, unit="MB", peer=4000.0, ratio=0.25),
            dict(row, name="fastest of each: " + row["name"])]
    with tempfile.TemporaryDirectory() as folder:
        copy, lines = os.path.join(folder, "bench"), os.path.join(folder, "rows.json")
        os.makedirs(os.path.join(copy, "results"))
        for name in ("chart.py", "gpu.py", "pytorch.py"):
            shutil.copy(os.path.join("bench", name), copy)
        for path in glob.glob("bench/results/*.json"):
            shutil.copy(path, os.path.join(copy, "results"))
        with open(lines, "w", encoding="utf-8") as f:
            f.write("".join(json.dumps(r) + "\n" for r in rows))
        command = [sys.executable, os.path.join(copy, "chart.py"), "--add", lines, "--cpu", "AMD Zen 3",
                   "--isa", "AVX2", "--commit", "abcdef0", "--command", "bench/pytorch.py step"]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode:
            return [done.stdout]
        records, was = json.loads(text_of(os.path.join(copy, "results", "speed.json"))), chart.read()
        now = [r for r in records if r["commit"] == "abcdef0"]
        wrong = [w for w in map(record_wrong, records) if w]
        ratios = [(r["speed_ratio"], r["memory_ratio"]) for r in now]
        if len(records) != len(was) or ratios != [(3, 0.25)]:
            wrong.append(f"{len(was)} records became {len(records)}, of which {now} are new")
        if "3.00×" not in text_of(os.path.join(copy, "results", "speed.svg")):
            wrong.append("the picture does not show what was added")
        return wrong


def planned(*arguments, program="memory_ladder"):
    command = [os.path.join(B, program), "--json", *arguments]
    out = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    return [json.loads(line) for line in out.stdout.splitlines()] if out.returncode == 0 else []


def differences(shown, want):
    if not want or len(shown) != len(want):
        return [f"{len(shown)} rows are shown, {len(want)} are planned"]
    return [f"shown {a}, planned {b}" for a, b in zip(shown, want) if a != b]


def fits_table(found):
    """Returns the rows of the table of largest micro-batches in docs/memory-and-budgets.md. A row has a cell
    "default / blocks / blocks, all offloaded" for each card, and the range of the host's memory that the last
    of these policies needs."""
    rows, host = {}, {}
    for r in found:
        name = f"{r['model']}, {r['precision']}"
        rows.setdefault(name, {}).setdefault(r["card_gb"], []).append(f"{r['batch']:,}")
        if r["offload"] != "none":
            host.setdefault(name, []).append(f"{r['host_bytes'] / 1e9:.0f}")
    return [[name] + [" / ".join(batches) for _, batches in sorted(cards.items())] +
            [f"{host[name][0]} to {host[name][-1]} GB"] for name, cards in rows.items()]


def check_fits():
    """Checks that docs/memory-and-budgets.md shows the largest micro-batches, and that no larger micro-batch
    fits."""
    found = planned("--fits")
    wrong = differences(rows_of(MEMORY, "| micro-batch"), fits_table(found))
    return wrong + [f"not the largest: {r}" for r in found
                    if not r["planned_bytes"] <= (r["card_gb"] - 0.7) * 1e9 < r["next_bytes"]]


def ladder_table(found):
    """Returns bench/README.md's rows: rung, PyTorch's GB, planned GB, extra FLOPs, GB on the host, copied."""
    def gb(x, unit=1e9):
        return "" if x is None else f"{x / unit:.2f}"
    return [[r["rung"], gb(r["article_gb"], 1), gb(r["planned_bytes"]), f"{100 * r['extra_flops']:.1f}%",
             gb(r["host_bytes"]), gb(r["copied_bytes"])] for r in found]


def check_ladder():
    """Checks the rungs in bench/README.md, and the sentences about rungs in docs/memory-and-budgets.md."""
    found = planned()
    wrong = differences(rows_of("bench/README.md", "| rung"), ladder_table(found))
    rung = {r["rung"]: (f"{r['planned_bytes'] / 1e9:.2f} GB", f"{(r['copied_bytes'] or 0) / 1e9:.1f} GB")
            for r in found}
    (blocks, _), (once, a), (four, b) = (rung["bf16-true, " + name] for name in
                                         ("blocks recomputed", "blocks, all offloaded",
                                          "blocks, 4 x 16, all offloaded, in 0.24 GB"))
    said = (f"in bf16-true is planned at {rung['bf16-true'][0]}, and {blocks} with `\"blocks\"`",
            f"everything offloaded, 64 images are planned at {once}, and a step copies {a}. In 4 micro-batches",
            f"the plan is {four}, and a step copies {b}.")
    text = " ".join(text_of(MEMORY).split())
    return wrong + [f"{MEMORY} does not say: {words}" for words in said if words not in text]


def printed(part):
    """Returns the lines that build/ranks prints for one of its parts."""
    out = subprocess.run([os.path.join(B, "ranks"), "--only", part], stdout=subprocess.PIPE, text=True)
    return out.stdout.splitlines() if out.returncode == 0 else []


def stages_table(lines):
    """Returns bench/README.md's rows of pipelines, from the lines that build/ranks prints per schedule."""
    rows = {}
    for line in lines:
        m = re.match(r"(.*?): (.*), (\d+) stages, (\w+), (\d+) micro-batches +([\d.]+) ms, waits +([\d.]+%) "
                     r"\( *([\d.]+%)\), transfers +([\d.]+%); GB a stage: (.*)", line)
        if m:
            machine, model, stages, schedule, micros, ms, waits, bubbles, transfers, gb = m.groups()
            row = rows.setdefault((machine, model, stages, micros), {})
            row[schedule] = (f"{ms}, {waits} ({bubbles})", transfers, gb.split())
    return [f"| {machine} | {model} | {stages}, {micros} | {r['1f1b'][0]} | {r['1f1b'][1]} | "
            f"{r['1f1b'][2][0]}, {r['1f1b'][2][-1]} | {max(r['gpipe'][2], key=float)} |"
            for (machine, model, stages, micros), r in rows.items()]


def check_shown(path, rows):
    """Checks that a file shows the rows of a table, except rows whose first three cells the file lacks."""
    lines = text_of(path).splitlines()
    begins = {tuple(line.split(" | ")[:3]) for line in lines}
    shown = [row for row in rows if tuple(row.split(" | ")[:3]) in begins]
    return [f"not there: {row}" for row in shown if row not in lines] + ["no such rows"] * (not shown)


def main():
    records = chart.read()
    check("records", [w for w in map(record_wrong, records) if w] +
          ["two records of one measurement"] * (len(set(map(chart.key, records))) < len(records)))
    stale = text_of(chart.PICTURE) != chart.picture(records)
    check("picture", ["speed.svg is not what speed.json gives: run bench/chart.py"] * stale)
    ranks = chart.read_ranks()
    stale = text_of(chart.RANKS_PICTURE) != chart.ranks_picture(ranks)
    check("picture_of_ranks", ["ranks.svg is not what ranks.json gives: run bench/chart.py"] * stale)
    stale = text_of(chart.DEVICES_PICTURE) != chart.devices_picture(chart.read_lines(chart.DEVICES))
    check("picture_of_devices", ["devices.svg is not what devices.json gives: run bench/chart.py"] * stale)
    stale = text_of(chart.GPU_PICTURE) != chart.gpu_picture(chart.read_gpu())
    check("picture_of_a_gpu", ["gpu.svg is not what the newest gpu_*.json gives: run bench/chart.py"] * stale)
    for name, path, want in (("speed", "README.md", chart.summary(records)),
                             ("speed", "bench/README.md", chart.table(records)),
                             ("ranks", DEVICES, chart.ranks_summary(ranks)),
                             ("ranks", "bench/README.md", chart.ranks_table(ranks))):
        lines = set(text_of(path).splitlines())
        check(f"{name}_in_{path}", [f"not there: {line}" for line in want.splitlines() if line not in lines])
    check("chart_add", check_added())
    if os.access(os.path.join(B, "memory_ladder"), os.X_OK):
        check(f"planned_in_{MEMORY}", check_fits())
        check("planned_in_bench/README.md", check_ladder())
        check("planned_ranks", differences(ranks, planned("--ranks", str(ranks[0]["ranks"]))))
    else:
        print(f"skip planned_memory: {B}/memory_ladder is not built: make bench-programs")
    if os.access(os.path.join(B, "ranks"), os.X_OK):
        lines = set(text_of("bench/README.md").splitlines())
        for part, table in (("replay", chart.replay_table), ("offload", chart.offload_table)):
            want = table(planned("--only", part, program="ranks")).splitlines()
            check(f"{part}_in_bench/README.md", [f"not there: {line}" for line in want if line not in lines])
        lines = set(text_of(DEVICES).splitlines())
        check(f"share_in_{DEVICES}", [f"not there: {line}" for line in printed("share")
                                     if line.startswith("| ") and line not in lines])
        check("stages_in_bench/README.md", check_shown("bench/README.md", stages_table(printed("stages"))))
    print(f"{passed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
