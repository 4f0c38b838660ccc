#!/usr/bin/env python3
"""Checks the tree of src/. Standard library only; run from the repository's root.

products_are_joined: tinytrain.h and tinytrain_cuda.cu are what tools/join.py makes of src/.

join_tells_mistakes: tools/join.py refuses mistakes, such as a file that no product has or a head that would
lose a part, and keeps a product that was edited by hand.

make_joins: make joins edits of src/, and reports an edited product or that it cannot join.

ops_in_one_place: no code outside of ops/, which has the rules and kernels of ops, asks which op an
instruction is. The facts that passes, plans and runs must know are flags of the op's row or rules of the op.

arrows_point_down: a file includes only files of its own folder and of folders above it in LAYERS.

files_include_what_they_use: the head of a file includes the file that defines each function, type, macro and
table in use, and no other file. base/base.h stands for all of api/, backend/ and base/.
backend/backend.h stands for all of api/ and backend/. Files that make names by pasting are exempt.

names_differ: no public name tt_x or TT_X has a private twin tt__x or TT__X.

files_are_short: no file has more than 1,500 lines, and no function more than 90, from brace to brace.

lines_are_short: no line of C, C++ or CUDA in src/, tests/, examples/ and bench/ has more than 110 columns.
"""
import glob
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time

LAYERS = ("api backend base tape cpu cuda ops passes plan ranks context compile run reports files text data "
          "models train").split()
UMBRELLAS = {"backend/backend.h": ("api", "backend"), "base/base.h": ("api", "backend", "base")}
SYSTEM = ("base/system.h", "api/standard.h")
PASTED = ("ops/rules.h", "ops/kernels.h", "ops/kernels.cuh", "cpu/kernels.h", "cpu/variants.h", "cpu/undo.h")
ASKS = re.compile(r"[=!]= *\(?TT__OP_[A-Z]|\bTT__OP_[A-Z_]+ *[=!]=|\bcase TT__OP_[A-Z]")
MAX_FILE, MAX_FUNCTION, MAX_COLUMNS = 1500, 90, 110
NAME = re.compile(r"TT__K\(\w+\)|\b(?:tt_|TT_)\w+")
OWN = r"(TT__K\(\w+\)|\w+)"
DEFINES = [re.compile(p, re.M) for p in (
    r"^#define (\w+)",
    r"^(?!return|else|typedef|#)[A-Za-z_][\w ,\"\[\]]*?(?:\(target\(.*?\)\)\) ?)?[ *]" + OWN +
    r"\([^;{]*\)?[^;{]*\{",
    r"^(?! )[\w ]+[ *]" + OWN + r"\([^{;]*\)(?: __attribute__[^;]*)?;",
    r"^(?:TT__TABLE |static |extern )+const [\w *]+?" + OWN + r"(?:\[.*?\])* =",
    r"^typedef (?:struct|enum|union) \w+ (\w+);",
    r"^typedef .*?\(\*(\w+)\)",
    r"^typedef [\w ]+[ *]" + OWN + r"(?: __attribute__.*)?;",
    r"^(?:typedef )?(?:struct|enum|union) (\w+) \{",
    r"^\} (\w+);")]
OPENS = re.compile(r"( *)(?:\S.*\) (?:const )?)?\{$")
ROWS = re.compile(r"^TT__ROWS?_FN\((\w+)\)", re.M)
ENUM = re.compile(r"enum(?: \w+)? \{(.*?)\}", re.S)


def code(text):
    """Blanks comments and strings of a text. Keeps the number of lines."""
    blank = lambda m: re.sub(r"[^\n]", " ", m.group(0))
    return re.sub(r'/\*.*?\*/|//[^\n]*|"(?:\\.|[^"\\\n])*"', blank, text, flags=re.S)


def read_tree():
    """Returns {path below src/: (head, code of the body, line number where the body begins)}."""
    tree = {}
    for folder, _, names in os.walk("src"):
        for name in names:
            path = os.path.relpath(os.path.join(folder, name), "src")
            if path.count("/") and path.endswith((".h", ".cuh")) and path != "cpu/alone.h":
                text = open(os.path.join("src", path), encoding="utf-8").read()
                head, _, body = text.partition("\n\n")
                tree[path] = (head, code(body), head.count("\n") + 2)
    return tree


def includes(path, head):
    found = re.findall(r'#\s*include "([^"]+)"', head)
    return [os.path.normpath(os.path.join(os.path.dirname(path), name)) for name in found]


def defined(body):
    names = {n for d in DEFINES for n in d.findall(body)}
    names |= {f"TT__K({n})" for n in ROWS.findall(body)}
    for inside in ENUM.findall(body):
        names.update(re.findall(r"(?:^|,)\s*(\w+)", inside))
    return {n for n in names if re.match(r"tt_|TT_", n)}


def asks(tree):
    return [(path, at + n, f"asks for an op: {line.strip()}")
            for path, (_, body, at) in tree.items() if not path.startswith("ops/")
            for n, line in enumerate(body.split("\n")) if ASKS.search(line)]


def twins(tree):
    used = {path: set(NAME.findall(body)) for path, (_, body, _) in tree.items()}
    every = set().union(*used.values())
    return [(path, 1, f"uses {name}, which differs from {name.replace('__', '_', 1)} by one underscore only")
            for path, names in used.items() for name in sorted(names)
            if name[2:4] == "__" and name.replace("__", "_", 1) in every]


def upward(tree):
    found = []
    for path, (head, _, _) in tree.items():
        if path.split("/")[0] not in LAYERS:
            found.append((path, 1, "is in a folder that LAYERS does not name"))
            continue
        all_used = includes(path, head)
        for used in all_used:
            if used == path or all_used.count(used) > 1:
                found.append((path, 1, f"includes {used} twice, or itself"))
            elif used not in tree:
                found.append((path, 1, f"includes {used}, which is not there"))
            elif used.split("/")[0] in LAYERS and LAYERS.index(used.split("/")[0]) > \
                    LAYERS.index(path.split("/")[0]):
                found.append((path, 1, f"includes {used}, which is below it"))
    return found


def unincluded(tree):
    names = {path: defined(body) for path, (_, body, _) in tree.items()}
    home, found = {}, []
    for path, defines in names.items():
        for name in defines:
            home.setdefault(name, set()).add(path)
    for path, (head, body, _) in tree.items():
        if path in UMBRELLAS or path in PASTED:
            continue
        direct = includes(path, head)
        seen, folders = set(direct) | {path}, set().union(*(UMBRELLAS.get(d, ()) for d in direct))
        # a pointer to a struct needs no include
        used = set(NAME.findall(re.sub(r"\bstruct \w+ \*", "", body)))
        for name in sorted(used & set(home)):
            if not any(there in seen or there.split("/")[0] in folders for there in home[name]):
                found.append((path, 1, f"uses {name} and does not include {min(home[name])}"))
        if path.endswith(".h"): # names of CUDA code have no common prefix
            found += [(path, 1, f"includes {there} and uses nothing of it") for there in direct
                      if there not in (*UMBRELLAS, *PASTED, *SYSTEM) and not used & names.get(there, used)]
    return found


def long(tree):
    found = []
    for path, (_, body, at) in tree.items():
        lines = body.split("\n")
        if len(lines) + at > MAX_FILE:
            found.append((path, 1, f"has {len(lines) + at} lines"))
        starts = {} # by indentation: line of the last brace, alone or after a parenthesis
        for n, line in enumerate(lines):
            if opens := OPENS.match(line):
                starts[opens[1]] = n
            indent = line[:len(line) - len(line.lstrip())]
            if line.lstrip().startswith("}") and indent in starts:
                start = starts.pop(indent)
                if n - start + 1 > MAX_FUNCTION:
                    found.append((path, at + start, f"begins a function of {n - start + 1} lines"))
    return found


def wide():
    found = []
    for path in sorted(glob.glob("**/*.*", recursive=True)):
        if re.match(r"(src|tests|examples|bench)/.*\.(h|c|cpp|cu|cuh)$", path):
            with open(path, encoding="utf-8") as file:
                found += [("", 0, f"{path}:{n + 1}: has {len(line.rstrip())} columns")
                          for n, line in enumerate(file) if len(line.rstrip()) > MAX_COLUMNS]
    return found


EXAMPLE = {
    "base/low.h": ("#pragma once", "static int tt__low(void)\n{\n    return 1;\n}\n", 2),
    "passes/a.h": ('#pragma once\n#include "../train/high.h"', "if (i->op == TT__OP_ADD) tt__low();\n", 3),
    "train/high.h": ('#pragma once\n#include "../base/low.h"', "#define TT__HIGH 1\n", 3),
}
assert len(asks(EXAMPLE)) == 1 and len(upward(EXAMPLE)) == 1
assert sorted(path for path, _, _ in unincluded(EXAMPLE)) == ["passes/a.h", "passes/a.h", "train/high.h"]
for before in ("{", "int tt__a(void) {", "struct a {\n    int f(int x) const\n    {"):
    inner = "    " if "\n" in before else ""
    assert long({"base/a.h": ("", before + "\n" * 95 + inner + "}\n", 2)})

SMALL = {
    "src/tinytrain.h": '#include "manual.h"\n#include "base/a.h"\n#include "base/b.h"\n',
    "src/tinytrain_cuda.cu": '#include "tinytrain.h"\n',
    "src/manual.h": "#pragma once\n\n/* manual */\n",
    "src/base/base.h": '#pragma once\n#include "a.h"\n',
    "src/base/a.h": "#pragma once\n\n/* a */\nint a;\n",
    "src/base/b.h": '#pragma once\n#include "base.h"\n\n/* b */\nint b;\n',
}
MISTAKES = { # mistake: (the changed or new file, its new text, part of join's message)
    "a file that is not joined": ("src/base/c.h", "#pragma once\n\nint c;\n", "joined into nothing"),
    "a file above the folders": ("src/c.h", "#pragma once\n\nint c;\n", "joined into nothing"),
    "no empty line": ("src/base/a.h", "#pragma once\n/* a */\nint a;\n\nint c;\n", "'/* a */'"),
    "code in the head": ("src/base/a.h", "#pragma once\n#define A\n\nint a;\n", "'#define A'"),
    "a system header in the head": ("src/base/a.h", "#pragma once\n#include <math.h>\n\nint a;\n", "<math"),
    "no guard": ("src/base/b.h", '#include "base.h"\n\nint b;\n', "#pragma once"),
    "no head": ("src/base/b.h", "\nint b;\n", "#pragma once"),
    "an include behind the head": ("src/base/b.h", '#pragma once\n\n#include "a.h"\n', "behind the head"),
    "a cycle": ("src/base/a.h", '#pragma once\n#include "b.h"\n\nint a;\n', "joins later"),
    "lines of Windows": ("src/base/a.h", "#pragma once\r\n\r\nint a;\r\n", "newline"),
    "no newline at the end": ("src/base/a.h", "#pragma once\n\nint a;", "newline"),
}


def run_join(folder, changed, *flags):
    for name, text in changed.items():
        os.makedirs(os.path.dirname(os.path.join(folder, name)), exist_ok=True)
        with open(os.path.join(folder, name), "w", encoding="utf-8", newline="") as file:
            file.write(text)
    return subprocess.run([sys.executable, os.path.abspath("tools/join.py"), *flags], cwd=folder,
                          stderr=subprocess.PIPE, text=True)


def mistakes():
    found = []
    for what, (name, text, says) in MISTAKES.items():
        with tempfile.TemporaryDirectory() as folder:
            run = run_join(folder, {**SMALL, name: text})
            if not run.returncode or says not in run.stderr:
                found.append(("", 0, f"join.py does not tell {what}: {run.stderr.strip() or 'it joins'}"))
    with tempfile.TemporaryDirectory() as folder:
        first, product = run_join(folder, SMALL), os.path.join(folder, "tinytrain.h")
        joined = open(product, encoding="utf-8").read() if first.returncode == 0 else first.stderr
        for edited in (joined + "int edit;\n", joined.replace("\n", "\r\n")):
            if not run_join(folder, {"tinytrain.h": edited}, "--check").returncode:
                found.append(("", 0, "join.py --check passes a product that was edited"))
        os.utime(product, (2**32, 2**32)) # makes the product newer than src/
        run_join(folder, {})
        kept = os.path.join(folder, "build/tinytrain.h.replaced")
        if open(product, encoding="utf-8").read() != joined or not os.path.isfile(kept):
            found.append(("", 0, "join.py loses a product that was edited"))
    return found


def make_joins():
    """Checks what make does after an edit of a product, after an edit of src/, and without Python."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for name in ("src", "tools"):
            shutil.copytree(name, os.path.join(folder, name))
        for name in ("Makefile", "tests/tests.mk", "tests/cuda_emu/emu.mk", "tests/fuzz/fuzz.mk",
                     "bench/bench.mk"):
            os.makedirs(os.path.dirname(os.path.join(folder, name)), exist_ok=True)
            shutil.copy(name, os.path.join(folder, name))
        product, source = (os.path.join(folder, name) for name in ("tinytrain.h", "src/train/fit.h"))
        env = {k: v for k, v in os.environ.items() if k not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")}

        def make(edited, python=sys.executable):
            """Appends a comment to `edited` (None: no file) and runs make. Returns the product and stderr."""
            if edited:
                time.sleep(0.05) # waits, because file times may be coarse
                with open(edited, "a", encoding="utf-8") as file:
                    file.write("/* edited */\n")
            run = subprocess.run(["make", "-j1", "B=b", f"PYTHON={python}", "tinytrain.h"], cwd=folder,
                                 env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
            return open(product, encoding="utf-8").read(), run.stderr
        first, _ = make(None)
        again, said = make(product)
        if again != first or "replaced" not in said:
            found.append(("", 0, f"make does not tell that tinytrain.h was edited: {said.strip()}"))
        joined, said = make(source)
        if "/* edited */" not in joined or said:
            found.append(("", 0, f"make does not join what was edited: {said.strip()}"))
        again, said = make(source, "no-python")
        if again != joined or "is not there" not in said:
            found.append(("", 0, f"make does not tell that it cannot join: {said.strip()}"))
    return found


TREE = read_tree()
JOIN = subprocess.run([sys.executable, "tools/join.py", "--check"], stderr=subprocess.PIPE, text=True)
CHECKS = {
    "products_are_joined": [("", 0, JOIN.stderr.strip())] if JOIN.returncode else [],
    "join_tells_mistakes": mistakes(),
    "make_joins": make_joins(),
    "ops_in_one_place": asks(TREE),
    "arrows_point_down": upward(TREE),
    "files_include_what_they_use": unincluded(TREE),
    "names_differ": twins(TREE),
    "files_are_short": long(TREE),
    "lines_are_short": wide(),
}
for check, places in CHECKS.items():
    for place, number, what in places:
        print(f"src/{place}:{number}: {what}" if place else what)
    print(f"FAILED {check}: {len(places)} places" if places else f"ok {check}")
FAILED = sum(bool(places) for places in CHECKS.values())
print(f"{len(CHECKS)} checks: {len(CHECKS) - FAILED} passed, {FAILED} failed")
sys.exit(FAILED > 0)
