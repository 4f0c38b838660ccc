#!/usr/bin/env python3
"""Runs the examples for Windows by Wine beside the examples for this system: bits, kill and resume, Ctrl-C,
paths, a full disk, errors. Standard library only; run from the repository's root:

    python3 tests/windows.py B WINDOWS_B [WINE]

B and WINDOWS_B have the examples of `make examples` and `make examples WINDOWS=1`. Both builds need the same
compiler flags. WINE is the command that runs a program (/usr/lib/wine/wine64).
"""
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time

HERE, THERE = (os.path.abspath(path) for path in sys.argv[1:3])
WINE = sys.argv[3] if len(sys.argv) > 3 else "/usr/lib/wine/wine64"
os.environ.setdefault("WINEDEBUG", "-all")
os.environ["LC_ALL"] = "C.UTF-8" # Wine converts names of files by the locale
counts = {True: 0, False: 0}


def check(name, right, *what):
    counts[bool(right)] += 1
    print(f"ok {name}" if right else f"FAILED {name}: {' '.join(str(w) for w in what)[-800:]}", flush=True)


def run(windows, program, *arguments, folder=None, isa=None, stop=None, seconds=600):
    """Runs an example. stop: a function that is called with the process until the process has ended. Returns
    (exit status, output with errors)."""
    command = [WINE, os.path.join(THERE, program)] if windows else [os.path.join(HERE, program)]
    environment = dict(os.environ, **({"TINYTRAIN_ISA": isa} if isa else {}))
    with tempfile.TemporaryFile() as out:
        process = subprocess.Popen([*command, *arguments], cwd=folder, stdin=subprocess.DEVNULL, stdout=out,
                                   stderr=out, env=environment)
        end = time.monotonic() + seconds
        while process.poll() is None and time.monotonic() < end:
            if stop:
                stop(process)
            time.sleep(0.01)
        if process.poll() is None:
            process.kill()
        status = process.wait()
        out.seek(0)
        return status, out.read().decode(errors="replace")


def contents(*path):
    try:
        with open(os.path.join(*path), "rb") as f:
            return f.read()
    except OSError:
        return None


def metrics(folder):
    """Returns metrics.csv without its last two columns, time and speed."""
    lines = (contents(folder, "metrics.csv") or b"").decode().split("\n")
    return [line.split(",")[:-2] for line in lines]


def same_run(a, b):
    for name in ("state.safetensors", "model.safetensors", "config.json", "loss.svg"):
        if contents(a, name) is None or contents(a, name) != contents(b, name):
            return name
    return "metrics.csv" if metrics(a) != metrics(b) else ""


def main(folder):
    sets = ["portable"] + [isa for isa, flag in (("avx2", " avx2 "), ("avx512", " avx512bw "))
                           if flag in open("/proc/cpuinfo").read()]
    def path(name):
        return os.path.join(folder, name)
    for isa in sets: # every set of kernels has the bits that it has here
        for windows in (False, True):
            os.makedirs(path(f"{isa}{windows}"))
            status, out = run(windows, "hello", folder=path(f"{isa}{windows}"), isa=isa)
            check(f"hello_{isa}_{'windows' if windows else 'here'}", status == 0 and "100.0% right" in out,
                  out)
        a, b = (contents(path(f"{isa}{w}"), "hello.safetensors") for w in (False, True))
        check(f"hello_{isa}_has_the_same_bits", a and a == b)
    with open(path("table.csv"), "w", encoding="ascii") as f:
        f.write("text,label\n" + "".join(f"{'good fine' if k % 2 else 'bad poor'} film {k},{k % 2}\n"
                                        for k in range(80)))
    small = ["--data", path("table.csv"), "--batch", "8", "--epochs", "30", "--threads", "2"]
    whole = path("whole")
    status, out = run(False, "distilbert_imdb", "--out", whole, *small)
    check("demo_here", status == 0, out)
    name = path("Übung 日本語/" + "/".join(40 * c for c in "abcdefgh")) # 350 characters, beyond MAX_PATH
    os.makedirs(os.path.dirname(name))
    status, out = run(True, "distilbert_imdb", "--out", name, *small)
    check("demo_in_a_long_path_of_unicode", status == 0, out)
    check("demo_has_the_same_bits", same_run(whole, name) == "", same_run(whole, name), "differs")

    def kill(process): # once a state was saved
        if os.path.exists(path("killed/state.safetensors")):
            process.kill()
    status, out = run(True, "distilbert_imdb", "--out", path("killed"), *small, stop=kill)
    check("killed_before_its_end", status == -signal.SIGKILL, status, out)
    status, out = run(True, "distilbert_imdb", "--out", path("killed"), "--resume", *small)
    check("killed_run_is_resumed", status == 0 and same_run(whole, path("killed")) == "", out,
          same_run(whole, path("killed")), "differs")

    def interrupt(process):
        if os.path.exists(path("stopped/state.safetensors")) and not interrupted:
            interrupted.append(1)
            process.send_signal(signal.SIGINT)
    interrupted = []
    status, out = run(True, "distilbert_imdb", "--out", path("stopped"), *small, stop=interrupt)
    check("ctrl_c_saves_and_ends_with_130", status == 130 and "--resume continues from there" in out, status,
          out)
    status, out = run(True, "distilbert_imdb", "--out", path("stopped"), "--resume", *small)
    check("stopped_run_is_resumed", status == 0 and same_run(whole, path("stopped")) == "", out)

    os.makedirs(path("disk"))
    mount = ["mount", "-t", "tmpfs", "-o", "size=20m", "tmpfs", path("disk")]
    if subprocess.run(mount, stderr=subprocess.PIPE, check=False).returncode:
        print("skip full_disk: this user may not mount a disk of 20 MB")
    else:
        def fill(process): # after the first state
            if os.path.exists(path("disk/run/state.safetensors")) and not os.path.exists(path("disk/fill")):
                with open(path("disk/fill"), "wb", buffering=0) as f, contextlib.suppress(OSError):
                    while f.write(bytes(4096)):
                        pass
        status, out = run(True, "distilbert_imdb", "--out", path("disk/run"), *small, stop=fill)
        check("full_disk_is_told", status == 1 and "No space left on device" in out, status, out)
        os.remove(path("disk/fill"))
        status, out = run(True, "distilbert_imdb", "--out", path("disk/run"), "--resume", *small)
        check("after_a_full_disk_is_resumed", status == 0 and same_run(whole, path("disk/run")) == "", out)
        subprocess.run(["umount", path("disk")], check=True)

    for arguments, says in ((["--btach", "8"], "did you mean --batch?"),
                            (["--data", path("nö.tsv")], "nö.tsv"), (["--out", whole], "holds a run"),
                            (["--model", path("none")], "none")):
        status, out = run(True, "distilbert_imdb", *arguments)
        check(f"error_of_{arguments[0][2:]}", status == 1 and says in out, status, out)
    status, out = run(True, "tt_doctor")
    check("doctor", status == 0 and "memory:" in out, out)


with tempfile.TemporaryDirectory() as made:
    main(made)
print(f"{counts[True]} passed, {counts[False]} failed")
sys.exit(1 if counts[False] or not counts[True] else 0)
