#!/usr/bin/env python3
"""Removes one barrier, wait or bound at a time from a .cu, and reports which tests on the emulator notice.

    mutate.py FILE.cu [PROGRAM.cu ...] [--builds plain,trace] [--only TEXT] [--first] [--seconds 60]
              [--cxx g++] [--cc gcc] [--list]

All mutants are compiled at once, each with a switch that the environment variable EMU_MUTANT=number turns
on. The first run of each test notes which mutants it reaches. A mutant then runs the tests that reach it, the
quickest first, until one notices or --seconds worth of tests have passed. Programs include FILE.cu by its
name alone. Without a PROGRAM, FILE.cu is a program itself, except tinytrain_cuda.cu, which is linked with
LINKED below. A mutant that no build notices is a hole in the tests, unless EQUIVALENT says why it does the
same as the original. The status is 1 if there is a hole, or if the original itself fails. The portability
block (#ifndef TT_EMULATE) and the code after #include "emu_test.h" are not mutated.
"""
import argparse
import glob
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
FLAGS = {"plain": "-O1 -ftrivial-auto-var-init=pattern", "trace": "-O1 -fsanitize=thread",
         "asan": "-O1 -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=all"}
RUNTIME = {"plain": "-O1", "trace": "-O1 -DEMU_TRACE", "asan": "-O1 -fsanitize=address"}
with open(os.path.join(HERE, "emu.mk")) as makefile:
    DEFINES = re.search(r"^EMU_DEFINES\s*:= ((?:.*\\\n)*.*)", makefile.read(), re.M).group(1)
DEFINES = re.findall(r"-D\S+", DEFINES) + ["-I" + HERE, "-I" + ROOT]

# Programs that are linked with a .cu: (program, arguments of all runs, pattern of the parts of the tests,
# environment variable). Each part is a run. The environment variable names the part; if it is None, an
# argument names the part.
LINKED = {
    "tinytrain_cuda.cu": [
        ("tests/test_ops.c", ["reference_cuda", "gradient_cuda"], r"^    X\((\w+), [A-Z]", "TT_TEST_CASE"),
        ("tests/test_ops.c", [],
         r"TEST_CASE(?:_IN_PARTS)?\((stochastic_rounding_of_each_isa|cuda_\w+|matmul_in_\w+|training_in_fp8|"
         r"attention_by_warpgroups|parameters_begin_on_the_device|biases_of_attention_cuda)\)", None),
        ("tests/test_cuda.c", [], r"TEST_CASE(?:_IN_PARTS)?\((\w+)\)", None),
    ],
}

# Matches the right side of a comparison with a bound: a number of rows, columns or elements.
EXTENT = (r"(?:(?:\w+\.)?(?:cols|rows|n|length|queries|count|head_size|end|to|all|parts|left|width|columns)"
          r"|g\.[mk])")
TERM = r"(?:\(int\))?[\w.]+(?:\[\w+\])?"
SUM = TERM + r"(?: [+*/%] " + TERM + r")*"
BEFORE = r"(?:(?<=\()|(?<=!)|(?<=[=?:;,] )|(?<=&& )|(?<=\|\| ))"
ARGS = r"(?:[^()]|\([^()]*\))*"

# Mutations: name, pattern to look for (ARGS: balanced parentheses), replacement. If the pattern has a group
# (?P<at>), only that group is replaced.
MUTATIONS = [
    ("no barrier", r"__syncthreads\(\)", "(void)0"),
    ("no warp barrier", r"__syncwarp\([^)]*\)", "(void)0"),
    ("no wait for cp.async", r"tt__cp_async_wait<\d+>\(\)", "(void)0"),
    ("no fence for wgmma", r"tt__wgmma_fence\(\)", "(void)0"),
    ("products not committed", r"tt__wgmma_commit\(\)", "(void)0"),
    ("no wait for wgmma", r"tt__wgmma_wait<[^<>]*>\(\)", "(void)0"),
    ("no wait for a phase", r"tt__phases_wait\(ARGS\)", "(void)0"),
    ("no arrival", r"tt__phases_arrive(?:_with_copies)?\(ARGS\)", "(void)0"),
    ("not published for wgmma", r"tt__wgmma_publish\(\)", "(void)0"),
    ("a product too many under way", r"tt__wgmma_wait<0>\(\)", "tt__wgmma_wait<1>()"),
    ("a group too many under way", r"tt__cp_async_wait<(\d+)>\(\)", r"tt__cp_async_wait<\1 + 1>()"),
    ("no wait for the event", r"cudaStreamWaitEvent\(ARGS\)", "cudaSuccess"),
    ("no record of the event", r"cudaEventRecord\(ARGS\)", "cudaSuccess"),
    ("no wait for the stream", r"cudaStreamSynchronize\(ARGS\)", "cudaSuccess"),
    ("no zero fill", r"(?P<at>[^,;()?]+ \? 16 : 0)\)", "16"),
    ("one too many", BEFORE + r"(%s) < (%s)(?![\w.(\[]| [*/%%+-])" % (SUM, EXTENT), r"\1 <= \2"),
    ("one too many", BEFORE + r"(%s) >= (%s)(?![\w.(\[]| [*/%%+-])" % (SUM, EXTENT), r"\1 > \2"),
    ("no bound", r"if \((?P<at>%s < %s) && \w+ < \w+\)" % (SUM, TERM), "true"),
    ("no bound", r"if \(%s < %s && (?P<at>\w+ < \w+)\)" % (SUM, TERM), "true"),
]

# (file, mutation, the line or a part of the line): why the mutant is as correct as the original
EQUIVALENT = {
    ("sample.cu", "no zero fill", "tt__cp_async_16(to_"):
        "rows past the end then hold row 0, which is as good: the sums that they enter are not stored",
    ("tinytrain_cuda.cu", "no wait for the stream", "cudaStreamSynchronize(d->stream);"):
        "cudaFree, cudaFreeHost and the end of a graph or a stream wait for what is under way; "
        "here it is said",
    ("tinytrain_cuda.cu", "no wait for the stream", 'cudaStreamSynchronize(d->stream), "find_wgmma"'):
        "the copy to the host's pageable memory waits; here it is said",
    ("tinytrain_cuda.cu", "one too many", "4 * i < n; i += gridDim.x"):
        "of a block of four that begins at the end the bound inside takes none",
    ("tinytrain_cuda.cu", "one too many", "at < to; at += TT__SORT_STEP"):
        "a step that begins at the end finds no id",
    ("tinytrain_cuda.cu", "one too many", "__ballot_sync(0xffffffffu, k < to)"):
        "the lane behind the last id is above all that have one, "
        "and what it adds to the count only ids behind it would read",
    ("tinytrain_cuda.cu", "one too many", "if (k < to && !lower)"):
        "the lane behind the last id, if none below it has digit 0, adds none to the count",
    ("tinytrain_cuda.cu", "one too many", "for (int64_t k = from; k < end; k += 4)"):
        "four rows that begin at the end are none",
    ("tinytrain_cuda.cu", "one too many", "k < parts && c < to.cols"):
        "the sum of the column behind the last is not stored",
    ("tinytrain_cuda.cu", "one too many", "+ threadIdx.x); i < t.n;"):
        "eight elements that begin at the end are read as zeros",
    ("tinytrain_cuda.cu", "one too many", "i < to; i += 2048"):
        "of eight elements that begin at the end none is stored",
    ("tinytrain_cuda.cu", "one too many", "bool before = lane * step < n"):
        "the sequence behind the last that it may be begins behind the tile that is looked for",
    ("tinytrain_cuda.cu", "one too many", "from < n; from += 256"):
        "a round that begins at the end compares none",
    ("tinytrain_cuda.cu", "one too many", "end < t.n ? end : t.n"):
        "the lesser of two equal numbers is either",
    ("tinytrain_cuda.cu", "one too many", "from + rows_per_chunk < dy.rows ?"):
        "the lesser of two equal numbers is either",
    ("tinytrain_cuda.cu", "one too many", "c < head_size; c += 32"):
        "a round that begins at the end adds zeros",
    ("tinytrain_cuda.cu", "one too many", "k0 < g.k; k0 += 16"):
        "a round that begins at the end adds zeros",
    ("tinytrain_cuda.cu", "one too many", "key < b.end; key +="):
        "no query sees a key of a round that begins at the end",
    ("tinytrain_cuda.cu", "one too many", "key < end; key +="):
        "no query sees a key of a round that begins at the end",
    ("tinytrain_cuda.cu", "one too many", "from < t.queries; from += 64"):
        "a round that begins at the end has no query",
    ("tinytrain_cuda.cu", "one too many", "i >= q.count ? -1"):
        "the query behind the last and its gradient are zeros, whatever their weights",
    ("tinytrain_cuda.cu", "one too many", "bytes = i < n ? 4 : 0"):
        "the query behind the last and its gradient are zeros, whatever lse and delta are",
    ("tinytrain_cuda.cu", "one too many", "if (begin < t.queries) fetch"):
        "nobody looks at what is fetched of no query",
    ("tinytrain_cuda.cu", "one too many", "if (from + QUERIES < t.queries) fetch"):
        "nobody looks at what is fetched of no query",
    ("tinytrain_cuda.cu", "one too many", "if (mine >= count"):
        "a warp without rows computes what it then does not store",
    ("tinytrain_cuda.cu", "one too many", "c0 < n; c0 += 8 * 1024"):
        "a round that begins at the end has no column",
    ("tinytrain_cuda.cu", "one too many", "if (c < n) store8(row_at(dz, r), dz.dtype, c, n - c"):
        "of eight columns that begin at the end none is stored",
}

SWITCH = """#include <stdio.h>
#include <stdlib.h>
static const int emu_mutant = getenv("EMU_MUTANT") ? atoi(getenv("EMU_MUTANT")) : -1;
static struct emu_reached_sites {
    bool at[%d];
    ~emu_reached_sites()
    {
        FILE *f = getenv("EMU_REACHED") ? fopen(getenv("EMU_REACHED"), "w") : NULL;
        for (int k = 0; f && k < %d; k++) if (at[k]) fprintf(f, "%%d\\n", k);
        if (f) fclose(f);
    }
} emu_reached;
// Runs on the device too, which may not read the host's memory.
__attribute__((no_sanitize("thread"), noinline)) static bool emu_is(int k)
{
    emu_reached.at[k] = true;
    return k == emu_mutant;
}
#line 1 "%s"
"""


def code_regions(text):
    """Returns the part of the source that is mutated: (begin, end)."""
    begin, end = 0, len(text)
    block = text.find("#ifndef TT_EMULATE")
    depth = 0 # depth of conditions within the block
    for m in re.finditer(r"^#(if|endif)", text[block:], re.M) if block >= 0 else []:
        depth += 1 if m.group(1) == "if" else -1
        if depth == 0:
            begin = block + m.start()
            break
    tests = text.find('#include "emu_test.h"')
    return begin, tests if tests >= 0 else end


def on_device(text, at):
    """Returns whether a place is in a device function, or in a struct that has a device function."""
    header = max(m.start()
                 for m in re.finditer(r"^(?:template|static|struct|extern|inline|__)", text[:at], re.M))
    return bool(re.search(r"__global__|__device__", text[header:at]))


def mutants(text):
    """Returns (name, line number, line, begin, end, replacement) of each mutant, in source order."""
    begin, end = code_regions(text)
    found = []
    for name, pattern, instead in MUTATIONS:
        for m in re.finditer(pattern.replace("ARGS", ARGS), text[begin:end]):
            first, last = (begin + x for x in m.span("at" if "at" in m.groupdict() else 0))
            line_begin = text.rfind("\n", 0, first) + 1
            line = text[line_begin:text.index("\n", first)]
            if "//" in text[line_begin:first] or line.startswith("#"):
                continue
            if name == "one too many" and not on_device(text, first):
                continue
            found.append((name, text.count("\n", 0, first) + 1, line.strip(), first, last, m.expand(instead)))
    return sorted(found, key=lambda x: (x[3], x[4]))


def switched(text, found, name):
    """Returns the source with all mutants."""
    out, at, k = [SWITCH % (len(found), len(found), name)], 0, 0
    while k < len(found):
        first, last = found[k][3:5]
        choice = ""
        out.append(text[at:first])
        while k < len(found) and found[k][3] < last: # one place may have several mutants
            assert found[k][3:5] == (first, last), found[k]
            choice += "emu_is(%d) ? %s : " % (k, found[k][5])
            k += 1
        out.append("(%s%s)" % (choice, text[first:last]))
        at = last
    return "".join(out) + text[at:]


def run(command, **options):
    return subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                          errors="replace", **options)


def build_runtime(cxx, build, folder):
    parts = ["cuda_emu", "cuda_emu_blas"] + (["cuda_emu_trace"] if build == "trace" else [])
    for part in parts:
        source, target = os.path.join(HERE, part + ".cpp"), os.path.join(folder, "%s.%s.o" % (part, build))
        subprocess.run([cxx, "-std=c++17", "-g", *RUNTIME[build].split(), "-c", source, "-o", target],
                       check=True)
    return [os.path.join(folder, "%s.%s.o" % (part, build)) for part in parts]


def build_programs(options, build, folder, name):
    """Compiles and links the programs of a build. Returns the paths of the programs."""
    def compiled(p):
        target = os.path.join(folder, "%s.%s.o" % (p, build))
        subprocess.run([options.cxx, "-std=c++17", "-g", "-w", *FLAGS[build].split(), *DEFINES, "-x", "c++",
                        "-c", os.path.join(folder, p), "-o", target], check=True)
        return target

    def linked(p, objects):
        target = os.path.join(folder, "%s.%s" % (os.path.basename(p), build))
        subprocess.run([options.cxx, *sanitize, *objects, "-o", target, "-lm", "-lpthread"], check=True)
        return target

    runtime = build_runtime(options.cxx, build, folder)
    sanitize = FLAGS[build].split() if build == "asan" else []
    if options.programs or name not in LINKED:
        return {p: linked(p, [compiled(p), *runtime])
                for p in [os.path.basename(p) for p in options.programs] or [name]}
    paths, runtime = {}, [compiled(name), *runtime]
    for p in sorted({p for p, *_ in LINKED[name]}):
        target = os.path.join(folder, "%s%s.o" % (os.path.basename(p), ".asan" * bool(sanitize)))
        if not os.path.exists(target): # the plain and the trace build share the host's code
            subprocess.run([options.cc, "-std=c99", "-g", *(sanitize or ["-O2"]), "-DTINYTRAIN_CUDA",
                            "-DTT_EMULATE", "-DTINYTRAIN_NO_AVX2", *DEFINES, "-c",
                            os.path.join(ROOT, p), "-o", target], check=True)
        paths[p] = linked(p, [target, *runtime])
    return paths


def runs_of(options, name):
    """Returns how the programs are run: (program, arguments, environment) of each run."""
    if options.programs or name not in LINKED:
        return [(os.path.basename(p), [], {}) for p in options.programs or [name]]
    all_runs = []
    for p, arguments, pattern, variable in LINKED[name]:
        texts = []
        for path in [os.path.join(ROOT, p)] + glob.glob(os.path.join(ROOT, p[:-2].replace("test_", "")) + "/*.h"):
            with open(path) as f:
                texts += re.findall(pattern, f.read(), re.M)
        parts = list(dict.fromkeys(texts))
        for part in parts:
            extra = {"TINYTRAIN_DEVICE": "cuda", "TT_TEST_SHARE": "1"}
            all_runs.append((p, arguments if variable else [part],
                             dict(extra, **{variable: part}) if variable else extra))
    return all_runs


def verdict(paths, one, mutant=-1, reached=None):
    """Runs a program. Returns None, or how the run noticed the mutant."""
    program, arguments, extra = one
    environment = dict(os.environ, EMU_WATCHDOG="20", EMU_MUTANT=str(mutant), **extra)
    if reached:
        environment["EMU_REACHED"] = reached
    try:
        result = run([paths[program], *arguments], timeout=300, env=environment)
    except subprocess.TimeoutExpired:
        return "takes more than 300 s"
    if result.returncode == 0:
        return None
    lines = [x for x in result.stdout.split("\n")
             if re.match(r"emu error|FAILED|.*ERROR: AddressSanitizer|.*runtime error", x)]
    return (lines[0] if lines else "status %d" % result.returncode)[:150]


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file")
    parser.add_argument("programs", nargs="*")
    parser.add_argument("--builds", default="plain,trace")
    parser.add_argument("--only", default="",
                        help="mutants whose name, line number or line match this expression")
    parser.add_argument("--first", action="store_true",
                        help="one build that notices is enough; the last one is asked first")
    parser.add_argument("--seconds", type=float, default=60, help="of tests, for each mutant and build")
    parser.add_argument("--cxx", default="g++")
    parser.add_argument("--cc", default="gcc")
    parser.add_argument("--list", action="store_true", help="do not build any")
    options = parser.parse_args()
    with open(options.file) as f:
        original = f.read()
    name = os.path.basename(options.file)
    found = mutants(original)
    wanted = [k for k, m in enumerate(found) if re.search(options.only, "%s %d: %s" % m[:3])]
    if options.list:
        for k in wanted:
            print("%s:%d: %s: %s" % (name, found[k][1], found[k][0], found[k][2]))
        print(len(wanted), "mutants")
        return 0
    builds = options.builds.split(",")
    folder = tempfile.mkdtemp(prefix="mutate_")
    try:
        for p in options.programs:
            shutil.copy(p, folder)
        with open(os.path.join(folder, name), "w") as f:
            f.write(switched(original, found, name))
        runs, paths, originals, reached = runs_of(options, name), {}, {}, os.path.join(folder, "reached")
        for b in builds:
            paths[b] = build_programs(options, b, folder, name)

        # returns the seconds of run k of the original, and the mutants that it reaches
        def original_run(b, k):
            if (b, k) not in originals:
                begin = time.time()
                wrong = verdict(paths[b], runs[k], reached=reached)
                if wrong:
                    sys.exit("the original fails in the %s build, %s: %s" % (
                        b, " ".join([runs[k][0], *runs[k][1], *runs[k][2].values()]), wrong))
                with open(reached) as f:
                    originals[b, k] = time.time() - begin, set(map(int, f))
            return originals[b, k]

        # Runs of the original in other builds are made when needed, because other builds may leave out other
        # parts of a test.
        for k in range(len(runs)):
            original_run(builds[0], k)
        quickest = sorted(range(len(runs)), key=lambda k: original_run(builds[0], k)[0])
        print("%s: %d runs of the original in %.0f s" % (builds[0], len(runs),
                                                         sum(x[0] for x in originals.values())))
        sys.stdout.flush()
        caught = equivalent = 0
        holes = []
        by_build = dict.fromkeys(builds, 0)
        for k in wanted:
            what, number, line = found[k][:3]
            seen, tried = {}, {}
            # The last build runs first, because the last build notices most. The runs of the first build
            # choose the tests, because the first build tells best which mutants a test reaches.
            for b in reversed(builds):
                seen[b], tried[b], spent = None, 0, 0
                if options.first and any(seen.values()):
                    continue
                for i in (i for i in quickest if k in original_run(builds[0], i)[1]):
                    if spent > options.seconds:
                        break
                    seconds, reaches = original_run(b, i)
                    if k not in reaches:
                        continue
                    seen[b] = verdict(paths[b], runs[i], k)
                    spent += seconds
                    tried[b] += 1
                    if seen[b]:
                        break
                by_build[b] += seen[b] is not None
            reason = next((r for (f, w, part), r in EQUIVALENT.items() if f == name and w == what and
                           part in line), None)
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
                print("    %-5s %s" % (b, seen[b] or "passes %d runs that reach it" % tried[b]))
            sys.stdout.flush()
        print("%d mutants: %d caught (%s), %d equivalent, %d not caught" % (
            len(wanted), caught, ", ".join("%s %d" % (b, by_build[b]) for b in builds), equivalent,
            len(holes)))
        for what, number, line in holes:
            print("NOT CAUGHT %s:%d: %s: %s" % (name, number, what, line))
        return 1 if holes else 0
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    sys.exit(main())
