"""Compares this version with that of another commit: speed of steps, matrix products and attention, time to
compile programs and the header, and the plans of the memory ladder.

    python3 bench/against.py [BASE] [--rounds 5] [--only plans,step,gemm,attention,compile,header]
                             [--new FOLDER]

BASE is a commit, or a folder with tinytrain.h and bench/; the default is commit 703a5d8. Every round runs
both versions, in the opposite order of the round before. The medians of the rounds' ratios, new / old, are
printed. The new version is slower if a ratio of seconds is above 1, or a ratio of speeds below 1. Exits with
1 if a plan is larger. Environment: B is the folder for built files (default: build). CC and CFLAGS (default:
-O2) compile the programs."""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time

B = os.environ.get("B", "build")
CC = os.environ.get("CC", "cc")
CFLAGS = os.environ.get("CFLAGS", "-O2").split()
HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
STRICT = ["-std=c99", "-Wall", "-Wextra", "-Wpedantic"]
PRECISIONS = ["32-true", "bf16-mixed", "16-true"]


def sources(version, name):
    """Returns the folder of a version. The files of a commit are written from git to a folder below B."""
    if os.path.isdir(version):
        return os.path.abspath(version)
    folder = os.path.join(B, "against", name)
    shutil.rmtree(folder, ignore_errors=True)
    os.makedirs(folder)
    archive = subprocess.run(["git", "-C", HERE, "archive", version, "tinytrain.h", "bench"], check=True,
                             stdout=subprocess.PIPE).stdout
    subprocess.run(["tar", "-x", "-C", folder], input=archive, check=True)
    return os.path.abspath(folder)


def built(folder, name, program):
    """Builds a benchmark of a version and returns its path. A benchmark that the version lacks is copied from
    this checkout."""
    source = os.path.join(folder, "bench", program + ".c")
    if not os.path.exists(source):
        shutil.copy(os.path.join(HERE, "bench", program + ".c"), source)
    to = os.path.join(B, "against", f"{program}.{name}")
    os.makedirs(os.path.dirname(to), exist_ok=True)
    subprocess.run([CC, *CFLAGS, *STRICT, "-I", folder, source, "-o", to, "-lm", "-lpthread"], check=True)
    return to


def rows(program, *arguments):
    """Runs a benchmark with --json and returns its rows as {name: value}."""
    command = [program, "--json", *arguments]
    out = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    lines = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    return {line["name"]: line["value"] for line in lines}


def plans(programs):
    """Compares all plans of the memory ladder. Returns the number of plans that need more memory, or fit a
    smaller micro-batch, in the new version."""
    settings = [["--device", device] for device in ("cuda", "cpu")]
    settings += [[*s, "--vit", "B/16", "--pixels", "160", "--batch", "7"] for s in settings]
    settings += [["--fits", "--device", "cuda"], ["--fits", "--device", "cpu"]]
    compared = larger = smaller = 0
    for setting in settings:
        lines = {}
        for name, program in programs.items():
            command = [program, "--json", *setting]
            done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            if done.returncode != 0 and name == "old" and "unknown option" in done.stderr:
                break
            if done.returncode != 0:
                raise SystemExit(done.stderr)
            out = done.stdout
            names = ("rung", "model", "precision", "recompute", "offload", "card_gb")
            lines[name] = {" ".join(str(x[k]) for k in names if x.get(k, "none") != "none"): x
                           for x in map(json.loads, filter(lambda l: l.startswith("{"), out.splitlines()))}
        if "old" not in lines:
            print(f"memory_ladder {' '.join(setting)}: the old version has no such option")
            continue
        for what, old in lines["old"].items():
            if what not in lines["new"]:
                print(f"memory_ladder {' '.join(setting)}: {what} is no more")
                continue
            new = lines["new"][what]
            if None in (old["planned_bytes"], new["planned_bytes"]):
                continue                            # the budget is too small for this model
            compared += 1
            # With --fits a row gives the largest micro-batch that fits a card, so the larger number is
            # better.
            if "batch" in old:
                worse, better = new["batch"] < old["batch"], new["batch"] > old["batch"]
                if new["batch"] == old["batch"]:
                    worse, better = (new["planned_bytes"] > old["planned_bytes"],
                                     new["planned_bytes"] < old["planned_bytes"])
            else:
                worse = new["planned_bytes"] > old["planned_bytes"] or new["extra_flops"] > old["extra_flops"]
                better = new["planned_bytes"] < old["planned_bytes"]
            larger += worse
            smaller += better and not worse
            if worse:
                print(f"larger: {' '.join(setting)}: {what}: {old} -> {new}")
    print(f"plans: {compared} compared, {larger} larger, {smaller} smaller")
    return larger


def in_turn(rounds, measure):
    """Calls measure(name) -> {what: value} for "old" and "new" in turn, and prints a line for each value."""
    seen = {"old": [], "new": []}
    for k in range(rounds):
        for name in ("old", "new") if k % 2 == 0 else ("new", "old"):
            seen[name].append(measure(name))
    for what in seen["new"][0]:
        if what not in seen["old"][0]:
            continue
        pairs = [(o[what], n[what]) for o, n in zip(seen["old"], seen["new"])]
        ratios = [n / o for o, n in pairs]
        old, new = statistics.median(o for o, _ in pairs), statistics.median(n for _, n in pairs)
        print(f"{what:58} {old:10.4g} {new:10.4g}   {statistics.median(ratios):6.3f}   "
              f"{min(ratios):.3f} .. {max(ratios):.3f}", flush=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("base", nargs="?", default="703a5d8")
    parser.add_argument("--new", default=HERE)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="plans,step,gemm,attention,compile,header")
    o = parser.parse_args()
    only = o.only.split(",")
    folders = {"old": sources(o.base, "base"), "new": sources(o.new, "new")}
    failed = 0
    if "plans" in only:
        failed = plans({name: built(folder, name, "memory_ladder") for name, folder in folders.items()})
    print(f"{'':58} {'old':>10} {'new':>10}   {'ratio':>6}   of the rounds")
    if "step" in only:
        programs = {name: built(folder, name, "step") for name, folder in folders.items()}
        for precision in PRECISIONS:
            for model in (["--length", "128", "--seqs", "8"], ["--vit", "S/16", "--seqs", "4"]):
                def step(name):
                    r = rows(programs[name], *model, "--layers", "2", "--steps", "8", "--warm", "2",
                             "--precision", precision)
                    ms = r["time of a step, mean"]
                    best = r["tokens a second, best step"]
                    what = f"ms a step, {precision} {' '.join(model)}"
                    return {what: ms, "  its best step, tokens/s": best}
                in_turn(o.rounds, step)
    if "gemm" in only:
        programs = {name: built(folder, name, "gemm") for name, folder in folders.items()}
        for precision in PRECISIONS:
            for size in ((2048, 768, 3072), (512, 768, 768), (37, 100, 52)):
                def gemm(name):
                    r = rows(programs[name], "--rows", str(size[0]), "--in", str(size[1]),
                             "--out", str(size[2]), "--seconds", "0.2", "--precision", precision)
                    return {f"GFLOP/s, {precision} {k}": v for k, v in r.items()}
                in_turn(o.rounds, gemm)
    if "attention" in only:
        programs = {name: built(folder, name, "attention") for name, folder in folders.items()}
        for precision in PRECISIONS[:2]:
            def attention(name):
                r = rows(programs[name], "--seconds", "0.1", "--precision", precision)
                return {f"GFLOP/s, {precision} {k}": v for k, v in r.items()}
            in_turn(o.rounds, attention)
    if "compile" in only:
        programs = {name: built(folder, name, "compile") for name, folder in folders.items()}
        def compiling(name):
            # Rounds the number of instructions in a row's name. The two versions' programs may differ by a
            # few instructions, and rows are compared by name.
            named = [(*k.split(" ", 1), v) for k, v in rows(programs[name], "--rounds", "2").items()]
            return {f"ms, {round(int(n), -2)} {rest}": v for n, rest, v in named}
        in_turn(o.rounds, compiling)
    if "header" in only:
        def header(name):
            begin = time.time()
            to = os.path.join(B, "against", "header.o")
            source = os.path.join(folders[name], "tinytrain.h")
            subprocess.run([CC, *CFLAGS, *STRICT, "-DTINYTRAIN_IMPLEMENTATION", "-I", folders[name],
                            "-x", "c", "-c", source, "-o", to], check=True)
            return {f"seconds to compile the header, {' '.join(CFLAGS)}": time.time() - begin}
        in_turn(o.rounds, header)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
