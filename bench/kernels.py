"""Prints a table of the compiled CUDA kernels: registers, spills, shared memory, instructions, and how many
warps a multiprocessor of compute capability 9.0 runs at a time. Needs no GPU.

    nvcc -O3 -std=c++17 -gencode arch=compute_90a,code=sm_90a -I. -c tinytrain_cuda.cu -o build/sm90.o
    python3 bench/kernels.py build/sm90.o                 # all kernels
    python3 bench/kernels.py build/sm90.o --targets       # the kernels that have a target, and their targets
    python3 bench/kernels.py before.o after.o --targets   # kernels of both objects side by side

An instance is named by its template arguments, as in the source; dtypes are f32, bf16, f16 and any.
"instructions" counts all instructions of the kernel. "loop" counts the instructions of the kernel's longest
loop, with both sides of every branch. If a kernel takes 8 elements at a time, "loop" is the most that 8
elements cost. Registers, threads and shared memory limit the warps: a multiprocessor has 65,536 registers
(each thread takes a multiple of 8), 228 KiB of shared memory, 64 warps and 32 blocks. Shared memory that a
launch asks for is not in the object and not counted. cuobjdump (CUDA toolkit) is looked for in PATH, or
named by CUOBJDUMP."""

import argparse
import os
import re
import subprocess
import sys

# The targets: for each kernel, by its printed name, a column of the table and the column's largest allowed
# value.
TARGETS = {
    "each_group<op_act<GELU>, bf16, bf16>": ("loop", 250),
    "each_group<op_act_backward<GELU>, bf16, bf16>": ("loop", 250),
    "update_parameters<Adam, bf16, bf16>": ("loop", 400),
    "layernorm_backward<1024, bf16, bf16>": ("registers", 128),
    "layernorm_backward<1024, bf16, f32>": ("registers", 128),
    "layernorm_backward<1024, f32, f32>": ("registers", 128),
}
# The activations of the table TT__ACTS, in the order of their numbers.
ACTIVATIONS = ["none"] + re.findall(r"^    X\((\w+), tt_\w+, (?:true|false)\)", open(os.path.join(
    os.path.dirname(os.path.abspath(__file__)), "../src/api/tape.h"), encoding="utf-8").read(), re.M)
DTYPES = {"-1": "any", "0": "f32", "1": "bf16", "2": "f16"}
COLUMNS = ["registers", "spills", "shared", "instructions", "loop", "warps"]


def run(*command):
    tool = os.environ.get("CUOBJDUMP", "cuobjdump")
    try:
        return subprocess.run([tool, *command], check=True, capture_output=True, text=True).stdout
    except FileNotFoundError:
        sys.exit(f"{tool} is not there: it comes with the CUDA toolkit; CUOBJDUMP names another")
    except subprocess.CalledProcessError as e:
        sys.exit(f"{tool} {' '.join(command)}: {e.stderr.strip() or 'failed'}")


def readable(symbols):
    """Returns the demangled names, without arguments and namespaces."""
    out = subprocess.run(["c++filt"], input="\n".join(symbols), check=True, capture_output=True, text=True)
    names = []
    for name in out.stdout.split("\n"):
        for text, short in (("(anonymous namespace)::", ""), ("void ", ""), ("__nv_bfloat16", "bf16")):
            name = name.replace(text, short)
        depth = 0
        for k, c in enumerate(name):  # cuts the name before its arguments
            depth += (c == "<") - (c == ">")
            if c == "(" and depth == 0:
                name = name[:k]
                break
        name = name.replace("__half", "f16")
        act = lambda m: f"{m[1]}<{ACTIVATIONS[int(m[2])]}>"
        name = re.sub(r"(op_act(?:_backward)?)<(\d)>", act, name)
        m = re.fullmatch(r"(each_group<.*), (-?\d), (-?\d)>", name)
        if m:
            name = f"{m[1]}, {DTYPES[m[2]]}, {DTYPES[m[3]]}>"
        m = re.fullmatch(r"update_parameters<(\w+), (-?\d), (-?\d)>", name)
        if m:
            name = f"update_parameters<{'Adam' if m[1] == 'true' else 'SGD'}, {DTYPES[m[2]]}, {DTYPES[m[3]]}>"
        m = re.fullmatch(r"(layernorm\w*)<(\d+), (\d+), (-?\d), (-?\d)>", name)
        if m:
            name = f"{m[1]}<{8 * int(m[2]) * int(m[3])}, {DTYPES[m[4]]}, {DTYPES[m[5]]}>"
        m = re.fullmatch(r"(swiglu_backward)<(-?\d)>", name)
        if m:
            name = f"{m[1]}<{DTYPES[m[2]]}>"
        names.append(name)
    return names


def instructions(sass):
    """Returns for each function the number of its instructions, and the number in its longest loop."""
    counts, found, name = {}, {}, None
    for line in sass.split("\n"):
        m = re.search(r"Function : (\S+)", line)
        if m:
            name = m[1]
            found[name] = []
        m = re.match(r"\s+/\*([0-9a-f]{4,6})\*/\s+(.*?);", line)
        if m and name:
            found[name].append((int(m[1], 16), m[2]))
    for name, code in found.items():
        code = [c for c in code if not c[1].endswith("NOP")]
        longest = 0
        for at, text in code:
            m = re.search(r"\bBRA(?:\.\w+)*\s.*?0x([0-9a-f]+)", text)
            if m and int(m[1], 16) < at:
                longest = max(longest, sum(int(m[1], 16) <= other <= at for other, _ in code))
        counts[name] = len(code), longest
    return counts


def threads(elf):
    """Returns the largest number of threads in a block of each function."""
    found, name, before = {}, None, ""
    for line in elf.split("\n"):
        m = re.match(r"\.nv\.info\.(\S+)", line.strip())
        if m:
            name = m[1]
        m = re.search(r"Value:\s+0x([0-9a-f]+) 0x1 0x1", line)
        if m and name and "MAX_THREADS" in before:
            found[name] = int(m[1], 16)
        if "Attribute" in line:
            before = line
    return found


def warps(registers, shared, block):
    of_block = (block + 31) // 32
    by_registers = 65536 // ((registers + 7) // 8 * 8 * 32) // of_block
    by_shared = 228 * 1024 // max(1, shared)
    return of_block * min(by_registers, by_shared, 64 // of_block, 32)


def read(path):
    usage, count = run("-res-usage", path), instructions(run("-sass", path))
    blocks = threads(run("-elf", path))
    symbols = re.findall(r"Function (\S+):\n\s+REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", usage)
    table = {}
    for name, (symbol, *numbers) in zip(readable([s[0] for s in symbols]), symbols):
        registers, _, shared, local = map(int, numbers)
        table[name] = dict(zip(COLUMNS, [registers, local, shared, *count[symbol],
                                         warps(registers, shared, blocks.get(symbol, 256))]))
    return table


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("objects", nargs="+", help="one compiled object, or two to compare")
    parser.add_argument("--targets", action="store_true", help="only kernels that have a target")
    options = parser.parse_args()
    tables = [read(path) for path in options.objects[:2]]
    names = sorted(set().union(*tables), key=lambda name: (name not in TARGETS, name))
    print(f"| kernel | {' | '.join(COLUMNS)} |{' target |' if options.targets else ''}")
    print("| --- |" + " ---: |" * len(COLUMNS) + (" --- |" if options.targets else ""))
    missed = 0
    for name in names:
        if options.targets and name not in TARGETS:
            continue
        row = [[str(t[name][c]) if name in t else "-" for t in tables] for c in COLUMNS]
        cells = [" -> ".join(c) if len(set(c)) > 1 else c[0] for c in row]
        line = f"| `{name}` | {' | '.join(cells)} |"
        if options.targets:
            column, most = TARGETS[name]
            now = tables[-1].get(name)
            met = now is not None and now[column] <= most
            missed += not met
            line += f" {column} <= {most}: {'met' if met else 'MISSED'} |"
        print(line)
    return missed > 0


if __name__ == "__main__":
    sys.exit(main())
