#!/usr/bin/env python3
"""Runs each of the benchmarks for a moment with --json, and checks that every line is an object with the keys
that bench/bench.h promises. Also runs the programs of bench/peers/gemm.c whose library was found. Checks that
`make bench-peers` continues without missing peers, and lists them; stand-ins replace pip and the compiler.
Checks that bench/gpu.sh runs without a GPU and without PyTorch. If built (make B/cuda_emu/step.plain), runs
the benchmark of steps on the emulator of CUDA. Standard library only; run from the repository's root. Skips
benchmarks that are not built (make bench-programs).

    python3 tests/check_bench.py             B: folder of the built benchmarks (build), from the environment
"""
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile

B = os.environ.get("B", "build")
KEYS = ["name", "value", "unit", "peak", "of_peak", "peer", "ratio"]
RUNS = ["gemm --seconds 0 --rows 64 --in 96 --out 80",
        "gemm --seconds 0 --rows 9 --in 33 --out 17 --precision bf16-true --threads 1",
        "few_bits --seconds 0 --rows 3 --in 64 --out 96", "attention --seconds 0", "rows --seconds 0", "tokenize",
        "step --layers 1 --seqs 1 --length 16 --steps 1", "step --peaks --seconds 0",
        "step --vit Ti/16 --pixels 32 --layers 1 --seqs 1 --steps 1",
        "step --big-bird block_sparse --layers 1 --seqs 1 --length 720 --steps 1",
        "images --seconds 0 --vit Ti/16 --from 48 --pixels 32 --seqs 1 --steps 1",
        "machines --vit Ti/16 --ranks 2 --batch 1 --zero 3 --steps 1",
        "lm --layers 1 --seqs 1 --length 16 --steps 1", "lm --layers 1 --generate 3 --prompt 2",
        "ranks --only moved", "ranks --only moved --ranks 3", "ranks --only replay --link 50 --latency 10",
        "ranks --only reduce --seconds 0 --elements 5000",
        "ranks --only reduce --seconds 0 --elements 300 --cpu-ranks 3",
        "ranks --only step --layers 1 --seqs 2 --length 16 --steps 1"]
REFUSED = ["gemm --precision foo", "tokenize --precision x", "rows --seconds", "attention --nonsense",
           "step --length 600", "step --big-bird sparse", "step --device cuda --seqs 1 --length 16",
           "gemm --rows 4",
           "images --from 70000", "ranks --only nothing", "ranks --only reduce --cpu-ranks 1",
           "ranks --only step --seqs 3", "ranks --only step --length 600", "machines --vit X/16",
           "machines --zero 4"]
LIBRARIES = ["gemm_openblas", "gemm_onednn"]
failed = passed = 0


def check(name, wrong):
    global failed, passed
    failed, passed = failed + bool(wrong), passed + (not wrong)
    print(f"FAILED {name}: {'; '.join(wrong[:3])}" if wrong else f"ok {name}", flush=True)


def run(arguments):
    program, *rest = arguments.split()
    return subprocess.run([os.path.join(B, program), "--json"] + rest, stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE, text=True)


def number(x, least=0.0):
    return isinstance(x, (int, float)) and not isinstance(x, bool) and math.isfinite(x) and x >= least


def line_wrong(line):
    """Returns the error in a line, or None."""
    try:
        row = json.loads(line)
    except ValueError as e:
        return f"no JSON ({e}): {line[:100]}"
    if not isinstance(row, dict) or list(row) != KEYS:
        return f"not the keys {KEYS}: {line[:100]}"
    if not (row["name"] and isinstance(row["name"], str) and isinstance(row["unit"], str) and
            number(row["value"])):
        return f"name, value or unit: {line[:100]}"
    if not all(row[k] is None or number(row[k]) for k in KEYS[3:]):
        return f"neither a number nor null: {line[:100]}"
    for share, whole in (("of_peak", "peak"), ("ratio", "peer")):
        if row[share] is not None and (
                row[whole] is None or
                not abs(row[share] * row[whole] - row["value"]) <= 1e-4 * row["value"]):
            return f"{share} is not value / {whole}: {line[:100]}"
    return None


def ranks_wrong(lines):
    """Checks plans of several ranks: a rank moves at most 3% more bytes than the minimum, and ViT-L/16 needs
    at most 3.15 GB a rank. Returns the errors."""
    rows = [json.loads(line) for line in lines]
    memory = [r["value"] for r in rows if r["name"].startswith("memory: ")]
    wrong = [f"moves {r['ratio']} times the least: {r['name']}" for r in rows
             if r["peer"] and not 1 <= r["ratio"] <= 1.03]
    return wrong + [f"{len(memory)} plans of memory"] * (len(memory) != 1) + [
        f"ViT-L/16 needs {gb} GB a rank" for gb in memory if not gb <= 3.15]


def check_gpu_script():
    """Runs all of bench/gpu.sh that works without a GPU, and checks the report. Returns the errors."""
    with tempfile.TemporaryDirectory() as folder:
        command = ["sh", "bench/gpu.sh", "--dry-run", "--prebuilt", "--no-peers", "--out", folder]
        out = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                             env=dict(os.environ, B=B, PYTHON=sys.executable))
        files = {name.rsplit(".", 1)[-1]: os.path.join(folder, name) for name in os.listdir(folder)}
        if out.returncode or sorted(files) != ["json", "log", "md"]:
            return [f"status {out.returncode}, wrote {sorted(files)}: {out.stdout[-300:]}"]
        with open(files["json"]) as f:
            report = json.load(f)
        wrong = [w for w in (line_wrong(json.dumps(row)) for row in report["rows"]) if w]
        measured = {row["name"].split(":")[0]
                    for row in report["rows"] if row["name"].endswith("time of a step")}
        wrong += [f"no step of {name} was measured"
                  for name in ("ViT, Ti/16 of 1 layer, 2 images, bf16-true, tinytrain",
                               "DistilBERT, 1 layer, 2 x 16, bf16-true, tinytrain",
                               "DistilBERT, IMDb lengths, 1 layer, batch 2, bf16-mixed, tinytrain",
                               "GPT-2, 1 layer, 1 x 16, bf16-true, tinytrain, nothing recomputed",
                               "GPT-2, 1 layer, 1 x 16, bf16-true, tinytrain, no dropout")
                  if name not in measured]
        beside = [row for row in report["rows"] if row["name"].endswith("beside the plan")]
        # The value is the memory of the whole process, which is at most 8 MB more than the plan.
        wrong += [f"{row['name']}: {row['value']} MB, planned {row['peer']} MB"
                  for row in beside if not row["peer"] <= row["value"] <= row["peer"] + 8]
        with open(files["md"]) as f:
            text = f.read()
        wrong += [f"{name} is not in the table"
                  for name in ("| tinytrain |", "| vit.bf16-true.tinytrain | ok |", "GFLOP/s",
                               "| doctor | ok", "| tests | skipped: no GPU |", "| train | skipped: no --imdb",
                               "| vit.bf16-true.ops | skipped: no GPU |", "| racecheck | skipped: no GPU |")
                  if name not in text]
        return wrong


def check_gpu_peers():
    """Runs PyTorch's peers, with stand-ins for `gpu.py torch`. Each peer must measure after the one before,
    and a peer that fails or takes too long must not stop the others. Returns the errors."""
    programs = {"one": "open(p + '.ready', 'w').close()\nwait('.go')\nprint(row)\nsay()\n"
                       "open(p + '.timed', 'w').close()\n",
                "fails": "sys.exit(3)\n",
                "hangs": "open(p + '.ready', 'w').close()\nwait('.never')\n",
                "two": "open(p + '.ready', 'w').close()\nwait('.go')\nsay()\nprint(row)\n"}
    start = ("import os, sys, time\np = sys.argv[3]\n"
             "def wait(what):\n    while not os.path.exists(p + what): time.sleep(0.01)\n"
             "def say():\n"
             "    with open(os.path.dirname(p) + '/order', 'a') as f: f.write(os.path.basename(p) + ' ')\n"
             f"row = {json.dumps({'name': 'time of a step, mean', 'value': 1.0})!r}\n")
    with tempfile.TemporaryDirectory() as folder:
        for name, text in programs.items():
            with open(os.path.join(folder, name + ".py"), "w") as f:
                f.write(start + text)
        with open(os.path.join(folder, "list"), "w") as f:
            f.write("\n".join(programs) + "\n")
        run_here = ("import sys; sys.path.insert(0, 'bench'); import gpu, os\n"
                    "start = gpu.Peer.start\n"
                    "def stand_in(self):\n"
                    "    self.command[1] = os.path.join(self.args.state, self.name + '.py')\n"
                    "    start(self)\n"
                    "gpu.Peer.start = stand_in\ngpu.main()\n")
        out = subprocess.run([sys.executable, "-c", run_here, "peers", "--list", os.path.join(folder, "list"),
                              "--state", folder, "--lock", os.path.join(folder, "lock"), "--each", "1"],
                             stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if out.returncode:
            return [f"status {out.returncode}: {out.stdout[-300:]}"]
        result = {}
        for name in programs:
            with open(os.path.join(folder, name + ".stage")) as f:
                result[name] = f.read().split("\t")[1]
        with open(os.path.join(folder, "order")) as f:
            order = f.read()
    wanted = {"one": "ok", "fails": "failed with status 3", "hangs": "ended after its 1 s", "two": "ok"}
    return ([f"they ended so: {result}"] * (result != wanted) +
            [f"their order is {order}"] * (order != "one two "))


# Stand-ins for `make bench-peers`: a compiler that does not find OpenBLAS and oneDNN, and a python3 whose
# venv has a pip without the packages in MISSING. Their folder also has a cblas.h of another library.
STAND_INS = {
    "cc": """case "$*" in *" -E "*) ;; *-lopenblas* | *-ldnnl*) echo "cannot find it" >&2; exit 1; esac\n"""
          """exec $REAL_CC "$@"\n""",
    "python3": """[ -n "$NO_VENV" ] && { echo "No module named ensurepip" >&2; exit 1; }\n"""
               """mkdir -p "$3/bin"\ncp "$STAND_INS/pip" "$STAND_INS/python" "$3/bin/"\n""",
    "pip": """echo "$*" >> "$STAND_INS/asked"\nfor m in $MISSING; do case " $* " in *" $m "*) """
           """echo "ERROR: No matching distribution found for $m"; echo "a hint"; exit 1;; esac; done\n""",
    "python": "echo a version\n",
}
PACKAGES = ["torch", "numpy", "safetensors", "transformers", "onednn-devel-cpu-gomp"]


def real_compiler():
    """Returns CC with its path. Without the path, a stand-in named cc would call itself."""
    words = os.environ.get("CC", "cc").split()
    return " ".join([shutil.which(words[0]) or words[0]] + words[1:])


def check_peers(missing, *, venv=True, llmc=False):
    """Runs `make bench-peers` without the packages `missing`, without a venv, or with a wrong LLMC folder.
    Returns the errors."""
    wrong = []
    with tempfile.TemporaryDirectory() as folder:
        for name, script in STAND_INS.items():
            with open(os.path.join(folder, name), "w") as f:
                f.write("#!/bin/sh\n" + script)
            os.chmod(f.name, 0o755)
        with open(os.path.join(folder, "cblas.h"), "w") as f:
            f.write("void cblas_sgemm();\n")
        environment = dict(os.environ, PATH=folder + os.pathsep + os.environ["PATH"], CPATH=folder,
                           STAND_INS=folder, MISSING=" ".join(missing), NO_VENV="" if venv else "1",
                           REAL_CC=real_compiler(), MAKEFLAGS="", MAKELEVEL="0")
        command = ["make", "bench-peers", "PEER_PROGRAMS=", "B=" + os.path.join(folder, "b"),
                   "VENV=" + os.path.join(folder, "venv"), "CC=" + os.path.join(folder, "cc"), "CFLAGS=",
                   "LLMC=" + (folder if llmc else "")]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                              env=environment)
        asked = ""
        if os.path.exists(os.path.join(folder, "asked")):
            with open(os.path.join(folder, "asked")) as f:
                asked = f.read()
    if done.returncode:
        wrong.append(f"status {done.returncode}: {done.stdout[-300:]}")
    wrong += [f"pip was not asked for {p}" for p in PACKAGES if venv and p not in asked]
    listed = done.stdout.rpartition("\nleft out:\n")[2].splitlines()
    expected = ["gemm_openblas needs OpenBLAS (Debian: libopenblas-dev): ", "gemm_onednn needs oneDNN 3"]
    expected += [f"{p.split('-')[0]}: pip cannot install it: ERROR: No matching distribution found for {p}"
                 for p in missing]
    expected += [] if venv else ["'python3 -m venv' fails (Debian: python3-venv): No module named ensurepip"]
    expected += ["/llmc: "] if llmc else []
    wrong += [f"not in the list: {e}" for e in expected if not any(e in line for line in listed)]
    if len(listed) != len(expected):
        wrong.append(f"{len(listed)} are left out instead of {len(expected)}: {listed}")
    return wrong


def main():
    check("bench-peers without libraries", check_peers([]))
    check("bench-peers without packages", check_peers(["torch", "transformers", "onednn-devel-cpu-gomp"]))
    check("bench-peers without venv and llm.c", check_peers([], venv=False, llmc=True))
    missing = [p for p in sorted({r.split()[0] for r in RUNS}) if not os.access(os.path.join(B, p), os.X_OK)]
    if missing:
        print(f"skip bench: {B}/{missing[0]} is not built: make bench-programs")
    for arguments in [] if missing else RUNS:
        out = run(arguments)
        lines = out.stdout.splitlines()
        wrong = [w for w in map(line_wrong, lines) if w]
        if out.returncode or out.stderr or not lines:
            wrong.insert(0, f"status {out.returncode}, {len(lines)} lines, {out.stderr.strip()[:200]}")
        if not wrong and len({(r["name"], r["unit"]) for r in map(json.loads, lines)}) < len(lines):
            wrong.append("two rows have the same name and unit")
        if not wrong and arguments == "ranks --only moved":
            wrong = ranks_wrong(lines)
        check("bench " + arguments, wrong)
    for arguments in [] if missing else REFUSED:
        out = run(arguments)
        check("bench refuses " + arguments,
              [] if out.returncode and not out.stdout and len(out.stderr.splitlines()) == 1 else
              [f"status {out.returncode}, says {out.stdout[:100]!r} and {out.stderr[:200]!r}"])
    check("bench/gpu.py peers", check_gpu_peers())
    if not missing:
        check("bench/gpu.sh --dry-run", check_gpu_script())
    if os.access(os.path.join(B, "cuda_emu", "step.plain"), os.X_OK):
        out = run("cuda_emu/step.plain --device cuda --vit Ti/16 --pixels 32 --layers 1 --seqs 1 --steps 2 "
                  "--product 32 --seconds 0 --precision bf16-true --ops")
        rows = {r["name"]: r for r in map(json.loads, out.stdout.splitlines())}
        wrong = ([w for w in map(line_wrong, out.stdout.splitlines()) if w] +
                 [f"status {out.returncode}: {out.stderr[:200]}"] * bool(out.returncode))
        # The device's memory holds nothing but the program.
        value_of = lambda name: rows[name]["value"]
        if not wrong and not 0 <= value_of("device memory grew by") - value_of("planned memory") < 0.01:
            wrong.append("the device's memory did not grow as planned")
        wrong += [f"no {name}" for name in ("op linear: alone", "op attention: multiply-adds",
                                            "FLOPs of a step, mean")
                  if name not in rows]
        check("bench step on an emulated GPU", wrong)
    for program in (p for p in LIBRARIES if os.access(os.path.join(B, p), os.X_OK)):
        out = subprocess.run([os.path.join(B, program), "9", "33", "17", "0"], stdout=subprocess.PIPE,
                             stderr=subprocess.PIPE, text=True)
        lines = [line.split() for line in out.stdout.splitlines()]
        check(program,
              [] if out.returncode == 0 and [name for name, _ in lines] == ["forward", "dX", "dW"] and
              all(float(speed) > 0 for _, speed in lines) else
              [f"status {out.returncode}, says {out.stdout[:100]!r} and {out.stderr[:200]!r}"])
    print(f"{passed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
