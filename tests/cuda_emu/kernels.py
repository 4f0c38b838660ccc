#!/usr/bin/env python3
"""Which kernels of a .cu the programs on the emulator ran: a test that fails if there is one that none did.

    kernels.py FILE.cu PROGRAM.kernels ...

PROGRAM.kernels is what PROGRAM wrote with EMU_KERNELS; nm tells the names. Prints of each kernel how often it ran and, of a template, how many
of the instances in these programs did, then the other instances. Ends as all tests do.
"""
import re
import subprocess
import sys
import textwrap


def kernels_of(path):
    with open(path) as f:
        text = re.sub(r"//[^\n]*", "", f.read())
    text = re.sub(r"__launch_bounds__\([^)]*\)|\bvoid\b|\bstatic\b", "", text)
    return list(dict.fromkeys(re.findall(r"__global__\s+(\w+)\s*\(", text)))


def main():
    kernels = kernels_of(sys.argv[1])
    runs = {} # by kernel: by instance
    for path in sys.argv[2:]:
        symbols = {}
        listing = subprocess.run(["nm", "-C", path[:-len(".kernels")]], stdout=subprocess.PIPE, text=True, check=True).stdout
        for line in listing.split("\n"):
            line = line.replace("(anonymous namespace)::", "")
            m = re.match(r"([0-9a-f]+) [tTwW] (?:void )?((\w+)(?:<.*>)?)\(", line)
            if m and m.group(3) in kernels and "[clone" not in line:
                symbols[int(m.group(1), 16)] = m.group(3), m.group(2)
                runs.setdefault(m.group(3), {}).setdefault(m.group(2), 0)
        with open(path) as f:
            for line in f:
                address, count = line.split()
                name, instance = symbols[int(address, 16)]
                runs[name][instance] += int(count)
    texts, missing = [], []
    for name in kernels:
        counts = runs.get(name, {}).values()
        of = "" if len(counts) < 2 else " (%d of %d instances)" % (sum(c > 0 for c in counts), len(counts))
        texts.append("%s %d%s" % (name, sum(counts), of))
        if not any(counts):
            missing.append(name)
    idle = [i for name in kernels for i, count in runs.get(name, {}).items() if not count and "<" in i]
    print(textwrap.fill("kernel runs: " + ", ".join(texts), 150, break_on_hyphens=False, subsequent_indent="    ", break_long_words=False))
    if idle:
        print(textwrap.fill("instances that did not run: " + "; ".join(idle), 150, break_on_hyphens=False, subsequent_indent="    ", break_long_words=False))
    failed = bool(missing) or not kernels
    print("FAILED all_kernels_run: of %s these did not: %s" % (sys.argv[1], ", ".join(missing)) if failed else "ok all_kernels_run")
    print("%d passed, %d failed" % (not failed, failed))
    return failed


if __name__ == "__main__":
    sys.exit(main())
