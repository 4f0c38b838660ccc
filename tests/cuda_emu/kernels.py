#!/usr/bin/env python3
"""Checks that the programs on the emulator ran every kernel of a .cu, and every instance of each template
kernel.

    kernels.py FILE.cu PROGRAM.kernels ...

PROGRAM.kernels is the file that PROGRAM wrote because of EMU_KERNELS; nm gives the kernels' names. Prints how
often each kernel ran, and at the end the line of passed and failed checks.
"""
import re
import subprocess
import sys
import textwrap


def kernels_of(path):
    with open(path) as f:
        text = re.sub(r"//[^\n]*", "", f.read())
    text = re.sub(r"__launch_bounds__\((?:[^()]|\([^()]*\))*\)|\bvoid\b|\bstatic\b", "", text)
    return list(dict.fromkeys(re.findall(r"__global__\s+(\w+)\s*\(", text)))


def instances_of(program, kernels):
    """Returns {address: (name, instance)} of the kernels in a program. An instance includes template
    arguments."""
    listing = subprocess.run(["nm", "-C", program], stdout=subprocess.PIPE, text=True, check=True).stdout
    found = {}
    for line in listing.replace("(anonymous namespace)::", "").split("\n"):
        m = re.match(r"([0-9a-f]+) [tTwW] (?:void )?((\w+)(?:<.*>)?)\(", line)
        if m and m.group(3) in kernels and "[clone" not in line:
            found[int(m.group(1), 16)] = m.group(3), m.group(2)
    return found


def main():
    kernels = kernels_of(sys.argv[1])
    runs = {name: {} for name in kernels} # number of runs by kernel and instance
    for path in sys.argv[2:]:
        symbols = instances_of(path[:-len(".kernels")], kernels)
        for name, instance in symbols.values():
            runs[name].setdefault(instance, 0)
        with open(path) as f:
            for line in f:
                address, count = line.split()
                name, instance = symbols[int(address, 16)]
                runs[name][instance] += int(count)
    texts = ["%s %d%s" % (name, sum(counts.values()),
                          " (%d instances)" % len(counts) if len(counts) > 1 else "")
             for name, counts in runs.items()]
    idle = [name for name in kernels if not runs[name]]
    idle += [instance for name in kernels for instance, count in runs[name].items() if not count]
    print(textwrap.fill("kernel runs: " + ", ".join(texts), 110, break_on_hyphens=False,
                        subsequent_indent="    ", break_long_words=False))
    failed = bool(idle) or not kernels
    print("FAILED all_kernels_run: of %s these did not: %s" % (sys.argv[1], "; ".join(idle)) if failed
          else "ok all_kernels_run")
    print("%d passed, %d failed" % (not failed, failed))
    return failed


if __name__ == "__main__":
    sys.exit(main())
