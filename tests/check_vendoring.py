#!/usr/bin/env python3
"""Checks cases that projects meet when they include the header. Standard library only; run from the
repository's root.

    python3 tests/check_vendoring.py         CC: compiler (cc), from the environment

  - After a system header that hides POSIX, compiling fails with one error, which says what to do.
  - After a system header that hides nothing, the header works, and the affinity mask sets the number of
    threads.
  - A build without optimisation logs a warning.
"""
import os
import subprocess
import sys
import tempfile

CC = os.environ.get("CC", "cc").split()
LATE = "#include <stdio.h>\n#define TINYTRAIN_IMPLEMENTATION\n#include \"tinytrain.h\"\n"
LATE += "int main(void) { tt_context *c = tt_open(NULL); "
LATE += "printf(\"%d\", tt_threads(c)); tt_close(c); return 0; }\n"
HIDES = ["-std=c99", "-std=c11", "-std=c99 -D_POSIX_C_SOURCE=200809L", "-std=c99 -D_XOPEN_SOURCE=700"]
SHOWS = ["-std=gnu99", "-std=c99 -D_GNU_SOURCE", "-std=c99 -D_DEFAULT_SOURCE"]
counts = {"ok": 0, "FAILED": 0, "skip": 0}


def report(word, name, why=""):
    counts[word] += 1
    print(f"{word} {name}{': ' + ' '.join(str(why).split())[:600] if why else ''}", flush=True)


def compile_late(folder, flags, *more):
    source = os.path.join(folder, "late.c")
    with open(source, "w") as f:
        f.write(LATE)
    command = CC + flags.split() + ["-Wall", "-Wextra", "-Wpedantic", "-Werror", "-I.", source, *more]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return done.returncode, done.stdout


def check_hidden(folder, flags):
    status, said = compile_late(folder, flags, "-fsyntax-only")
    errors = [line for line in said.splitlines() if " error: " in line]
    good = status and len(errors) == 1 and "include it first, or use -D_GNU_SOURCE or -std=gnu99" in errors[0]
    why = "" if good else f"status {status}, {len(errors)} errors: {said}"
    report("ok" if good else "FAILED", f"late_include {flags}", why)


def check_shown(folder, flags):
    status, said = compile_late(folder, flags, "-fsyntax-only")
    report("FAILED" if status else "ok", f"late_include {flags}", said if status else "")


def check_unoptimized(folder):
    """Checks that a program without optimisation warns once, and has a thread for each CPU of its mask."""
    cpus = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    program = os.path.join(folder, "late")
    flags = ["-O0", "-DTINYTRAIN_NO_AVX2", "-o", program, "-lm", "-lpthread"]
    status, said = compile_late(folder, "-std=gnu99", *flags)
    if status:
        return report("FAILED", "unoptimized_build", said)
    done = subprocess.run([program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                          preexec_fn=lambda: cpus and os.sched_setaffinity(0, cpus[:1]))
    good = done.stderr.count("without optimisation: compile with -O2") == 1
    report("ok" if good else "FAILED", "unoptimized_build", "" if good else done.stderr)
    if len(cpus) < 2:
        return report("skip", "late_include_affinity", "only one CPU may be used here")
    good = done.stdout == "1"
    report("ok" if good else "FAILED", "late_include_affinity", "" if good else f"threads: {done.stdout}")


def main():
    with tempfile.TemporaryDirectory() as folder:
        probe = os.path.join(folder, "probe.c")
        with open(probe, "w") as f:
            f.write("#include <stdio.h>\n#if !defined(_FEATURES_H)\n#error\n#endif\n")
        if subprocess.run(CC + ["-fsyntax-only", probe], stderr=subprocess.DEVNULL).returncode:
            report("skip", "late_include", "this C library hides nothing")
        else:
            for flags in HIDES:
                check_hidden(folder, flags)
        for flags in SHOWS:
            check_shown(folder, flags)
        check_unoptimized(folder)
    print(f"{counts['skip']} skipped: {counts['ok']} passed, {counts['FAILED']} failed")
    return 1 if counts["FAILED"] else 0


if __name__ == "__main__":
    sys.exit(main())
