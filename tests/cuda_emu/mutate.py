#!/usr/bin/env python3
"""Removes one barrier, wait or bound at a time from a .cu, builds test programs with it on the emulator, and tells which of them notice.

    mutate.py FILE.cu [PROGRAM.cu ...] [--builds plain,trace] [--only TEXT] [--cxx g++] [--list]

Without a program FILE.cu is one itself. A program includes FILE.cu by its name alone. A mutant that no build notices is a hole in the
tests, unless EQUIVALENT says why it does the same as the original. Status 1 if there is such a hole, or if the original itself fails.
What lies in the portability block (#ifndef TT_EMULATE) and behind #include "emu_test.h" is left alone.
"""
import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile

HERE = os.path.dirname(os.path.abspath(__file__))
FLAGS = {"plain": "-O1 -ftrivial-auto-var-init=pattern", "trace": "-O1 -fsanitize=thread",
         "asan": "-O1 -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=all"}
RUNTIME = {"plain": "-O1", "trace": "-O1 -DEMU_TRACE", "asan": "-O1 -fsanitize=address"}

# name, what to look for, what stands there instead. ARGS is replaced by a pattern for balanced parentheses.
MUTATIONS = [
    ("no barrier", r"__syncthreads\(\);", ";"),
    ("no warp barrier", r"__syncwarp\([^)]*\);", ";"),
    ("no wait for cp.async", r"tt_cp_async_wait<\d+>\(\)", "(void)0"),
    ("a group too many under way", r"tt_cp_async_wait<(\d+)>\(\)", lambda m: "tt_cp_async_wait<%d>()" % (int(m.group(1)) + 1)),
    ("no wait for the event", r"cudaStreamWaitEvent\(ARGS\)", "cudaSuccess"),
    ("no record of the event", r"cudaEventRecord\(ARGS\)", "cudaSuccess"),
    ("no zero fill", r"[^,;()]+? \? 16 : 0\)", " 16)"),
    ("one too many in the loop", r"(for \([^;]*(?:threadIdx\.x|= t); \w+) < (\w+;)", r"\1 <= \2"), # loops that the block shares
    ("one too many past the guard", r"(if \(\w+) >= (\w+\) return)", r"\1 > \2"),
    ("no bound on the left", r"if \((\w+ < \w+) && (\w+ < \w+)\)", r"if (\2)"),
    ("no bound on the right", r"if \((\w+ < \w+) && (\w+ < \w+)\)", r"if (\1)"),
]
ARGS = r"(?:[^()]|\([^()]*\))*"

# (file, mutation, the line or a part of it): why the mutant is as right as the original
EQUIVALENT = {
    ("sample.cu", "no zero fill", "tt_cp_async_16(to_"):
        "rows past the end then hold row 0, which is as good: the sums that they enter are not stored",
}


def code_regions(text):
    """The part of the source that is mutated: (begin, end)."""
    begin, end = 0, len(text)
    block = text.find("#ifndef TT_EMULATE")
    if block >= 0:
        begin = text.index("\n#endif", block)
    tests = text.find('#include "emu_test.h"')
    return begin, tests if tests >= 0 else end


def mutants(text):
    begin, end = code_regions(text)
    for name, pattern, instead in MUTATIONS:
        for m in re.finditer(pattern.replace("ARGS", ARGS), text[begin:end]):
            at, until = begin + m.start(), begin + m.end()
            line_begin = text.rfind("\n", 0, at) + 1
            line = text[line_begin:text.index("\n", at)].strip()
            if "//" in text[line_begin:at]:
                continue
            replacement = instead(m) if callable(instead) else m.expand(instead)
            yield name, text.count("\n", 0, at) + 1, line, text[:at] + replacement + text[until:]


def run(command, **options):
    return subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", **options)


def build_runtime(cxx, build, folder):
    parts = ["cuda_emu", "cuda_emu_blas"] + (["cuda_emu_trace"] if build == "trace" else [])
    for part in parts:
        source, target = os.path.join(HERE, part + ".cpp"), os.path.join(folder, "%s.%s.o" % (part, build))
        subprocess.run([cxx, "-std=c++17", "-g", *RUNTIME[build].split(), "-c", source, "-o", target], check=True)
    return [os.path.join(folder, "%s.%s.o" % (part, build)) for part in parts]


def verdict(cxx, build, objects, folder, programs):
    """None, or how a program noticed."""
    for program in programs:
        target = os.path.join(folder, "program")
        compiled = run([cxx, "-std=c++17", "-g", "-w", *FLAGS[build].split(), "-I" + HERE, "-I" + os.path.join(HERE, "../.."), "-x", "c++", "-c",
                        os.path.join(folder, program), "-o", target + ".o"])
        if compiled.returncode == 0:
            link = [] if build == "trace" else FLAGS[build].split()
            compiled = run([cxx, *link, target + ".o", *objects, "-o", target, "-lm", "-lpthread"])
        if compiled.returncode != 0:
            return "does not compile: " + compiled.stdout.split("\n")[0]
        try:
            result = run([target], timeout=120, env=dict(os.environ, EMU_WATCHDOG="5"))
        except subprocess.TimeoutExpired:
            return "takes more than 120 s"
        if result.returncode != 0:
            lines = [x for x in result.stdout.split("\n") if re.match(r"emu error|FAILED|.*ERROR: AddressSanitizer|.*runtime error", x)]
            return (lines[0] if lines else "status %d" % result.returncode)[:110]
    return None


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file")
    parser.add_argument("programs", nargs="*")
    parser.add_argument("--builds", default="plain,trace")
    parser.add_argument("--only", default="", help="mutants whose name or line holds this text")
    parser.add_argument("--cxx", default="g++")
    parser.add_argument("--list", action="store_true", help="do not build any")
    options = parser.parse_args()
    with open(options.file) as f:
        original = f.read()
    name = os.path.basename(options.file)
    all_mutants = [m for m in mutants(original) if options.only in m[0] + " " + m[2]]
    if options.list:
        for what, number, line, _ in all_mutants:
            print("%s:%d: %s: %s" % (name, number, what, line))
        print(len(all_mutants), "mutants")
        return 0
    builds = options.builds.split(",")
    folder = tempfile.mkdtemp(prefix="mutate_")
    try:
        objects = {b: build_runtime(options.cxx, b, folder) for b in builds}
        programs = [os.path.basename(p) for p in options.programs] or [name]
        for p in options.programs:
            shutil.copy(p, folder)

        def write(text):
            with open(os.path.join(folder, name), "w") as f:
                f.write(text)

        write(original)
        for b in builds:
            wrong = verdict(options.cxx, b, objects[b], folder, programs)
            if wrong:
                print("the original fails in the %s build: %s" % (b, wrong))
                return 1
        caught = equivalent = 0
        holes = []
        by_build = dict.fromkeys(builds, 0)
        for what, number, line, text in all_mutants:
            write(text)
            seen = {b: verdict(options.cxx, b, objects[b], folder, programs) for b in builds}
            reason = next((r for (f, w, part), r in EQUIVALENT.items() if f == name and w == what and part in line), None)
            for b in builds:
                by_build[b] += seen[b] is not None
            if any(seen.values()):
                caught += 1
                state = "caught" if not reason else "caught, although listed as equivalent"
            elif reason:
                equivalent += 1
                state = "equivalent: " + reason
            else:
                holes.append((what, number, line))
                state = "NOT CAUGHT"
            print("%s:%d: %s: %s: %s" % (name, number, what, line[:70], state))
            for b in builds:
                print("    %-5s %s" % (b, seen[b] or "passes"))
            sys.stdout.flush()
        print("%d mutants: %d caught (%s), %d equivalent, %d not caught" % (
            len(all_mutants), caught, ", ".join("%s %d" % (b, by_build[b]) for b in builds), equivalent, len(holes)))
        for what, number, line in holes:
            print("NOT CAUGHT %s:%d: %s: %s" % (name, number, what, line))
        return 1 if holes else 0
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    sys.exit(main())
