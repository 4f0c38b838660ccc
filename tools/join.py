#!/usr/bin/env python3
"""Joins src/ into the two files that users copy. Standard library only; run from the repository's root.

    tools/join.py                     writes tinytrain.h and tinytrain_cuda.cu
    tools/join.py --check             compares them with src/ and fails if they differ
    tools/join.py --lines --out DIR   writes them into DIR with #line: compilers name the files of src/
    tools/join.py --parts DIR         writes DIR/tinytrain.h, whose private functions other objects can call,
                                      and DIR/declared/tinytrain.h, which only declares all functions; with
                                      --lines they have #line, too. See tests/tests.mk

src/tinytrain.h and src/tinytrain_cuda.cu are the roots. join.py replaces each `#include "folder/file"` of a
root by a line with the file's name and the file without its head; an empty line separates two files. The head
of a file is the text before its first empty line: #pragma once or a guard, and includes of the files that the
file uses. A file may include only files that its root joins earlier. The roots join every file of src/.

join.py also replaces a product that was edited after src/, and keeps the edited copy as build/NAME.replaced.
"""
import argparse
import os
import re
import shutil
import sys

ROOTS = ("tinytrain.h", "tinytrain_cuda.cu")
ALONE = "cpu/alone.h"  # a file for sources compiled by themselves; cpu/variants.h includes it by a macro
INCLUDE = re.compile(r'\s*#\s*include "([^"]+)"')
# Matches #pragma once, an include, or an #ifndef to #endif block that a file needs when compiled by itself.
HEAD = re.compile(r'(#pragma once|#include "[^"]+"|#ifndef \w+ /\* by itself\b.*(\n.+)*?\n#endif)(\n|$)')


def read(path):
    with open(os.path.join("src", path), encoding="utf-8", newline="") as file:
        text = file.read()
    if "\r" in text or not text.endswith("\n"):
        sys.exit(f"join: src/{path} has lines that do not end with one newline (LF)")
    return text.split("\n")[:-1]


def includes(head, path):
    """Returns the files, relative to src/, that a file's head includes."""
    found = (INCLUDE.match(line) for line in head)
    return [os.path.normpath(os.path.join(os.path.dirname(path), m.group(1))) for m in found if m]


def split(path):
    """Returns a file's head, its body, and the line number of the body's first line."""
    lines = read(path)
    end = lines.index("") if "" in lines else len(lines)
    head, body, rest = lines[:end], lines[end + 1:], "\n".join(lines[:end])
    while HEAD.match(rest):
        rest = HEAD.sub("", rest, count=1)
    if not head or rest or not head[0].startswith(("#pragma once", "#ifndef ")):
        sys.exit(f"join: the head of src/{path} is to be #pragma once, the includes and an empty line, not "
                 f"'{(rest or 'nothing').splitlines()[0]}'")
    for number, line in enumerate(body, end + 2):
        if INCLUDE.match(line) and "/" in path: # the manual shows how to include the header
            sys.exit(f"join: src/{path}:{number} includes a file of src/ behind the head")
    return head, body, end + 2


def check_heads(path, head, joined):
    """Fails if a file that a head includes is not joined earlier. For an included file without a body, which
    is not joined, checks the files that this file's head includes."""
    for used in includes(head, path):
        if used in joined or used in ROOTS:
            continue
        if not os.path.isfile(os.path.join("src", used)):
            sys.exit(f"join: src/{path} includes src/{used}, which is not there")
        inner, body, _ = split(used)
        if body:
            sys.exit(f"join: src/{path} includes src/{used}, which its root joins later or not at all")
        check_heads(used, inner, joined)


def check_all_joined(joined):
    """Fails if a file of src/ is in none of the products."""
    for folder, _, names in os.walk("src"):
        for name in sorted(names):
            path = os.path.relpath(os.path.join(folder, name), "src")
            if path not in joined and path not in ROOTS and path != ALONE and split(path)[1]:
                sys.exit(f"join: src/{path} is joined into nothing: name it in src/{ROOTS[0]} or "
                         f"src/{ROOTS[1]}")


def keep_edits(path):
    """Keeps a product that is newer than all of src/, because somebody may have edited the product."""
    files = [os.path.join(folder, name) for folder, _, names in os.walk("src") for name in names]
    if os.path.getmtime(path) <= max(map(os.path.getmtime, files)):
        return
    kept = os.path.join("build", os.path.basename(path) + ".replaced")
    os.makedirs("build", exist_ok=True)
    shutil.copy(path, kept)
    print(f"join: {path} was newer than src/ and differed: it is replaced, and was kept as {kept}. Edit src/ "
          f"only", file=sys.stderr)


def join(root, joined, with_lines):
    out, after_file = [], False
    for number, line in enumerate(read(root), 1):
        m = INCLUDE.match(line)
        path = m.group(1) if m else None
        if path is None or path in ROOTS: # tinytrain_cuda.cu includes the header like a user
            out.append(line)
            after_file = False
            continue
        if path in joined:
            sys.exit(f"join: src/{root}:{number} joins src/{path} a second time")
        head, body, first = split(path)
        check_heads(path, head, joined)
        if with_lines:
            body = [f'#line {first} "src/{path}"'] + body + [f'#line {number + 1} "src/{root}"']
        joined.add(path)
        out += [""] * after_file + [f"/* ==== src/{path} */"] * ("/" in path) + body
        after_file = True
    if with_lines:
        out.insert(0, f'#line 1 "src/{root}"')
    return "\n".join(out) + "\n"


def parts(text):
    """Returns the header in two parts for the tests: functions and limits that every object can use, and
    their declarations. Line numbers stay the same. Functions lose `static`, except those that are inline,
    stand on one line, or are declared by macros (the CPU's kernels). A limit is a macro with the comment
    "tests set ..." after its #ifndef: TT__NAME becomes a variable tt__limit_name, which tests set."""
    text = text.replace("#define TT__TABLE static", "#define TT__TABLE")
    lines, ends, names = text.split("\n"), {}, set() # of a function: the lines of its { and }, its name
    for brace in [k for k, line in enumerate(lines) if line == "{"]:
        begin = brace - 1
        while lines[begin].startswith(" "):
            begin -= 1
        declared = re.match(r"(static )?(?!TT__)[^(]*?(\w+)\(", lines[begin])
        if declared and "inline" not in lines[begin] + lines[begin - 1]:
            ends[brace] = lines.index("}", brace)
            names.add(declared.group(2))
    for k, line in enumerate(lines):
        declared = re.match(r"static (?!inline)[^=(]*?(\w+)\(", line)
        if declared and declared.group(1) in names:
            lines[k] = line.removeprefix("static ")
    shared, declared = lines, lines[:]
    for k, line in enumerate(lines):
        limit = re.match(r"#ifndef (TT__(\w+)) /\* tests set\b", line)
        if limit:
            value, comment = re.match(r"#define \w+ (.*?)( /\*.*)?$", lines[k + 1]).groups("")
            name = "tt__limit_" + limit.group(2).lower()
            kind = "size_t" if "size_t" in value else "double" if "." in value else "int64_t"
            shared[k] = declared[k] = f"#define {limit.group(1)} {name}"
            shared[k + 1] = f"{kind} {name} = {value}{comment}"
            declared[k + 1] = f"extern {kind} {name}{comment}"
            end = lines.index("#endif", k)
            shared[end] = declared[end] = ";"
    for brace, end in ends.items():
        declared[brace - 1] += ";"
        declared[brace:end + 1] = [""] * (end + 1 - brace)
    return "\n".join(shared), "\n".join(declared)


def write(path, text):
    """Writes a file, if the text is not what the file has."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    if not os.path.isfile(path) or open(path, encoding="utf-8", newline="").read() != text:
        with open(path, "w", encoding="utf-8", newline="") as file:
            file.write(text)


def main():
    parser = argparse.ArgumentParser(description="Joins src/ into tinytrain.h and tinytrain_cuda.cu.")
    parser.add_argument("--check", action="store_true", help="compare, and fail if they differ")
    parser.add_argument("--lines", action="store_true", help="write #line, for a developer's build")
    parser.add_argument("--out", default=".", metavar="DIR", help="the folder of the two files")
    parser.add_argument("--parts", metavar="DIR", help="write tinytrain.h in parts, for the tests")
    options = parser.parse_args()
    joined, differ = set(), []
    texts = [join(root, joined, options.lines) for root in ROOTS]
    check_all_joined(joined)
    if options.parts:
        for folder, text in zip(("", "declared"), parts(texts[0])):
            write(os.path.join(options.parts, folder, "tinytrain.h"), text)
        return
    for root, text in zip(ROOTS, texts):
        path = os.path.join(options.out, root)
        old = open(path, encoding="utf-8", newline="").read() if os.path.isfile(path) else None
        if text != old and options.check:
            differ.append(root)
        elif text != old:
            if old is not None and not options.lines:
                keep_edits(path)
            with open(path, "w", encoding="utf-8", newline="") as file:
                file.write(text)
    if differ:
        sys.exit(f"join: {' and '.join(differ)} differ from src/: run tools/join.py, and edit src/ only")


if __name__ == "__main__":
    main()
