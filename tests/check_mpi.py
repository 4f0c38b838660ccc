#!/usr/bin/env python3
"""Trains in several processes, started by mpirun. Checks that results have the bits of one process, that
differences between processes are refused, and that after a fault of one process all processes end with one
sentence and training resumes from the last state.

Standard library only; run from the repository's root, with the folder B (build) in the environment. `make`
builds the programs: B/mpi_ranks (tests/mpi.c), B/mpi_vit_l16 and B/mpi_gpt, and optionally
B/cuda_emu/mpi_ranks for emulated GPUs.
TINYTRAIN_ALL_FAULTS=1: each fault at 20 moments.
"""
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor

B = os.environ.get("B", "build")
RANKS, VIT, GPT = f"{B}/mpi_ranks", f"{B}/mpi_vit_l16", f"{B}/mpi_gpt"
EMULATED = f"{B}/cuda_emu/mpi_ranks"
ALL = "TINYTRAIN_ALL_FAULTS" in os.environ
TIMEOUT = 4  # seconds that a process waits for another
MARGIN = 12  # additional seconds to start and to end on a busy machine
passed = failed = 0
one_at_a_time = threading.Lock()


def check(name, wrong):
    global passed, failed
    with one_at_a_time:
        passed, failed = passed + (not wrong), failed + bool(wrong)
        print(f"FAILED {name}: {wrong}" if wrong else f"ok {name}", flush=True)


def mpirun(processes, *command, env=None, limit=300):
    """Runs mpirun. Returns (status, output, seconds) of mpirun; status None: timeout."""
    flags = ["--oversubscribe"] if OPEN_MPI else []
    own = dict(os.environ, OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1", **(env or {}))
    begin = time.monotonic()
    with tempfile.TemporaryFile() as out:
        run = subprocess.Popen(["mpirun", *flags, "-n", str(processes), *map(str, command)], env=own,
                               stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True)
        try:
            status = run.wait(limit)
        except subprocess.TimeoutExpired:
            os.killpg(run.pid, signal.SIGTERM)
            run.wait()
            status = None
        out.seek(0)
        return status, out.read().decode(errors="replace"), time.monotonic() - begin


def contents(path):
    with open(path, "rb") as f:
        return f.read()


def ranks_tests(folder, processes, ranks, *tests, program=RANKS, where="", env=None):
    status, out, _ = mpirun(processes, program, folder, ranks, *tests, env=env, limit=600)
    names = re.findall(r"^ok (\w+)", out, re.M)
    wrong = re.findall(r"^FAILED .*$", out, re.M)
    for k in range(1, processes):
        path = f"{folder}/process.{k}"
        if os.path.exists(path):
            with open(path) as f:
                wrong += re.findall(r"^FAILED .*$", f.read(), re.M)
    for name in names:
        check(f"{name}{where}_{processes}x{ranks}", None)
    if status != 0 or wrong or not names:
        check(f"ranks{where}_{processes}x{ranks}", f"status {status}; " + ("; ".join(wrong) or out[-600:]))


def bits(folder):
    for processes, ranks in (2, 1), (3, 1), (2, 2):
        ranks_tests(folder, processes, ranks)
    for processes, ranks, *tests in ((3, 2, "processes*", "stages*", "bytes*"),
                                     (4, 1, "stages*"), (4, 2, "tensor*")):
        ranks_tests(folder, processes, ranks, *tests)


def emulated_gpus(folder):
    """Tests emulated GPUs of several processes. peers 0: not even the GPUs of one process share memory."""
    if not os.path.exists(EMULATED):
        return
    for processes, ranks, peers, aware, *tests in ((2, 1, 1, 0, "gradients*", "stages*"),
                                                   (2, 2, 1, 0, "tensor*", "bytes*", "stages*"),
                                                   (2, 2, 1, 1, "tensor*", "bytes*", "stages*"),
                                                   (2, 2, 0, 0, "processes*")):
        env = {"TINYTRAIN_DEVICE": "cuda", "EMU_DEVICES": "4", "EMU_PEERS": str(peers),
               "TINYTRAIN_MPI_CUDA": str(aware)}
        ranks_tests(folder, processes, ranks, *tests, program=EMULATED, env=env,
                    where="_cuda_aware" if aware else "_cuda" if peers else "_cuda_apart")


def differences(folder):
    for what, sentence in (("precision", "precision 'bf16-mixed'"), ("zero", "zero 3"),
                           ("clip_norm", "clip_norm 0"), ("tape", "tape "),
                           ("isa", "instruction set portable")):
        status, out, _ = mpirun(2, RANKS, folder, 1, "differ", what)
        named = re.search(r"process 1 \(.*\) has .*" + re.escape(sentence) + ".*, and process 0 has ", out)
        check(f"{what}_of_one_process_differs",
              None if status == 3 and named else f"status {status}: {out[-600:]}")


def train(folder, processes, ranks, steps, kind="none", process=0, at=0):
    return mpirun(processes, RANKS, folder, ranks, "train", steps, TIMEOUT, kind, process, at)


# For each kind of fault: a function of the moment k that returns (process, time of the fault), and a pattern
# of the error.
FAULTS = {
    "kill": (lambda k: (k % 3, 2 + 9 * k), r"process rank \d+ .*signal 9|process \d+ \(.*\)"),
    "stop": (lambda k: (k % 3, 2 + 9 * k),
             r": rank \d, process \d \(.*\), has not arrived within 4 s; its last message came in \w+ '.*'|"
             # the error if the fault comes before the first message
             r": \w+ '.*': rank \d, process \d \(.*\), has not arrived within 4 s|"
             r": (tt_allocate|a micro-batch|collecting the counts of losses): "
             r"rank \d, process \d \(.*\), has not arrived within 4 s: if that"),
    "full": (lambda k: (0, 20000 + 45000 * k), # largest file in bytes, smaller than a state
             r"process 0 \(.*\): cannot write '.*state.tmp': File too large"),
    "missing": (lambda k: (k % 3, 0), r"process \d+ \(.*\): cannot open '.*none'"),
    "input": (lambda k: (k % 3, 1 + k % 4),
              r"process \d \(.*\): rank \d of .*: embedding: 'ids' has 417 in row \d+, but must have"),
    "launch": (lambda k: (k % 3, 5 + 37 * k), r"process \d \(.*\): rank \d of .*: injected at \w+"),
    "exit": (lambda k: (k % 3, 1 + k % 4), r"exit code|Exit code|process \d \(.*\)"),
    "close": (lambda k: (k % 3, 1 + k % 4),
              r"\d \(.*\) has closed its context, after: cannot open 'this'|\d of 3: cannot open 'this'"),
}


def faults(folder):
    steps = 6
    right = f"{folder}/right"
    os.mkdir(right)
    status, out, _ = train(right, 3, 1, steps)
    check("train_without_a_fault", None if status == 0 else f"status {status}: {out[-600:]}")
    for kind, (when, sentence) in FAULTS.items():
        wrong = []
        for k in range(20) if ALL else (1, 6) if kind in ("kill", "stop", "full", "launch") else (1,):
            here = f"{folder}/{kind}{k}"
            os.mkdir(here)
            process, at = when(k)
            if kind == "missing":
                train(here, 3, 1, 2)
            # With many steps, the process is stopped while the other processes still need it.
            most = 300 if kind in ("kill", "stop") else steps
            status, out, seconds = train(here, 3, 1, most, kind, process, at)
            if status in (None, 0) or seconds > TIMEOUT + MARGIN:
                wrong.append(f"moment {k}: status {status} after {seconds:.1f} s: {out[-300:]}")
            elif not re.search(sentence, out, re.M):
                wrong.append(f"moment {k}: no such sentence: {out[-600:]}")
            if kind in ("kill", "stop"):
                continue
            status, out, _ = train(here, 3, 1, steps)
            if status != 0 or contents(f"{here}/final") != contents(f"{right}/final"):
                wrong.append(f"moment {k}: goes on with status {status}, other bits: {out[-300:]}")
        check(f"ends_with_a_sentence_{kind}", "; ".join(wrong))


def openings(folder):
    """Checks that processes wait no longer than the timeout for a process missing in tt_open or tt_close."""
    late = r"process [12] \(.*\) has waited 2 s in tt_open for another process, which has not arrived there"
    for kind, sentence in (("none", None), ("own_none", None), ("stop_before", late),
                           ("own_stop_before", late),
                           ("kill_before", "signal 9|non-zero exit code"), ("exit_before", late + "|exit"),
                           ("stop_between", r"tt_close: process 0 \(.*\) has not arrived within 2"),
                           ("own_stop_between", r"tt_close: process 0 \(.*\) has not arrived within 2")):
        status, out, seconds = mpirun(3, RANKS, folder, 1, "open", 2, kind)
        if sentence is None:
            wrong = status != 0 or out.strip()
        else:
            wrong = status in (None, 0) or seconds > 2 + MARGIN or not re.search(sentence, out)
        check(f"opening_{kind}", wrong and f"status {status} after {seconds:.1f} s: {out[-900:]}")


def signals_resume(folder):
    """Checks that training resumes from the saved state with one process fewer after a process was killed or
    stopped."""
    for kind in "kill", "stop":
        here = f"{folder}/{kind}"
        os.mkdir(here)
        train(here, 2, 2, 300, kind, 1, 150)
        whole = f"{folder}/{kind}.right"
        os.mkdir(whole)
        steps = 12
        for k in (here, whole):
            if k == here and os.path.exists(f"{here}/state"):
                done = int.from_bytes(state_steps(f"{here}/state"), "little")
                steps = max(steps, done + 2)
        one = train(here, 1, 4, steps)
        two = train(whole, 4, 1, steps)
        same = one[0] == two[0] == 0 and contents(f"{here}/final") == contents(f"{whole}/final")
        check(f"goes_on_after_{kind}", None if same else f"{one[:2]} {two[:2]}"[-600:])


def state_steps(path):
    """Returns the number of steps, as 8 bytes: the third number of the tensor tinytrain.run in a state."""
    with open(path, "rb") as f:
        header = f.read(int.from_bytes(f.read(8), "little"))
        begin = int(re.search(rb'"tinytrain.run".*?"data_offsets":\[(\d+)', header).group(1))
        f.seek(8 + len(header) + begin + 16)
        return f.read(8)


def examples(folder):
    if not os.path.exists(f"{B}/vit_l16"):
        return
    status, out, _ = mpirun(2, f"{B}/vit_l16", "--epochs", 1)
    refused = status and "started several processes" in out and "TINYTRAIN_MPI" in out
    check("refused_without_mpi", None if refused else f"status {status}: {out[-600:]}")

    for name, how in ("", "--groups 4 --zero 2"), ("_of_stages", "--pipeline 2 --groups 2 --accumulate 4"):
        small = f"--train 60 --test 40 --epochs 1 --threads 1 {how}".split()
        alone, together = f"{folder}/alone{name}", f"{folder}/together{name}"
        one = subprocess.run([f"{B}/vit_l16", *small, "--device", "cpu*4", "--out", alone],
                             stdin=subprocess.DEVNULL, capture_output=True, text=True)
        status, out, _ = mpirun(2, VIT, *small, "--device", "cpu*2", "--out", together)
        wrong = f"status {one.returncode}, {status}: {one.stderr[-300:]} {out[-600:]}"
        if one.returncode == 0 and status == 0:
            wrong = None
            for file in "state.safetensors", "model.safetensors":
                same = contents(f"{alone}/{file}") == contents(f"{together}/{file}")
                wrong = wrong or (None if same else f"{file} differs")
        if not wrong and out.count("saved: ") != 1:
            wrong = f"each process reports: {out[-600:]}"
        check(f"example_in_two_processes{name}", wrong)

    text = f"{folder}/text.txt"
    with open(text, "w") as f:
        f.write("one cat sat, and another did not. " * 40)
    tiny = "--layers 1 --hidden 16 --heads 2 --length 32 --epochs 1 --threads 1 --tokens 3".split()
    alone, together = f"{folder}/alone_gpt", f"{folder}/together_gpt"
    one = subprocess.run([f"{B}/gpt", *tiny, "--data", text, "--device", "cpu*2", "--out", alone],
                         stdin=subprocess.DEVNULL, capture_output=True)
    status, out, _ = mpirun(2, GPT, *tiny, "--data", text, "--out", together)
    same = one.returncode == 0 and status == 0 and out.count("saved: ") == 1 and (
        contents(f"{alone}/model.safetensors") == contents(f"{together}/model.safetensors"))
    wrong = f"status {one.returncode}, {status}: {out[-600:]}"
    check("language_model_in_two_processes", None if same else wrong)
    status, out, _ = mpirun(2, GPT, "--out", together, "--generate", "x")
    refused = status and "--generate runs in one process, but there are 2" in out
    check("texts_are_continued_by_one_process", None if refused else f"status {status}: {out[-600:]}")
    other = f"{folder}/other_gpt"
    shutil.copytree(together, other)
    with open(f"{other}/model.safetensors", "r+b") as f:
        f.seek(-4, os.SEEK_END)
        f.write(b"\0\0\0\x3f")
    begin = [GPT, "--data", text, "--length", 32, "--batch", 2, "--out", f"{folder}/tuned", "--model"]
    status, out, _ = mpirun(1, *begin, together, ":", "-n", "1", *begin, other)
    refused = status and re.search("process 1 .* has parameters whose values .* and process 0 has", out)
    check("weights_of_one_process_differ", None if refused else f"status {status}: {out[-600:]}")

    small = "--train 60 --test 40 --epochs 1 --threads 1 --timeout 60 --out".split()
    small = [VIT, *small, f"{folder}/other"]
    for flag, one, other, what in (("--lr", "1e-3", "0.5", "schedule cosine with lr 0.5,"),
                                   ("--epochs", "1", "2", "schedule"),
                                   ("--batch", "16", "8", "at most 68 tokens"),
                                   ("--augment", "false", "true", "pad 4 to train on"),
                                   ("--train", "60", "59", "59 images to train on"),
                                   ("--test", "40", "39", "39 images to evaluate")):
        status, out, _ = mpirun(1, *small, f"{flag}={one}", ":", "-n", "1", *small, f"{flag}={other}")
        named = re.search(rf"process 1 \(.*\) has {what}.*, and process 0 has ", out)
        check(f"{flag[2:]}_of_one_process_differs",
              None if status and named else f"status {status}: {out[-600:]}")

    small[-1] = f"{folder}/missing"
    status, out, _ = mpirun(1, *small, ":", "-n", "1", *small, "--model", f"{folder}/absent")
    named = re.search(r"process 1 \(.*\): cannot list the folder '.*absent", out)
    check("model_missing_on_one_process", None if status and named else f"status {status}: {out[-600:]}")


def main():
    global OPEN_MPI
    why = None if shutil.which("mpirun") else "there is no mpirun"
    why = why or (None if os.path.exists(RANKS) else f"{RANKS} is not there: no mpicc has built it")
    if why:
        print(f"skip check_mpi: {why}\n0 passed, 0 failed")
        return 0
    version = subprocess.run(["mpirun", "--version"], capture_output=True, text=True).stdout
    OPEN_MPI = "Open MPI" in version or "OpenRTE" in version
    # Two parts run at a time. The longest part starts first, because it takes as long as all others together.
    parts = [part for part in (emulated_gpus, bits, faults, examples, openings, signals_resume, differences)
             if not sys.argv[1:] or part.__name__ in sys.argv[1:]]

    def run(part):
        with tempfile.TemporaryDirectory() as folder:
            part(folder)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(run, parts)) # raises the exceptions of parts
    print(f"{passed} passed, {failed} failed")
    return failed > 0


if __name__ == "__main__":
    sys.exit(main())
