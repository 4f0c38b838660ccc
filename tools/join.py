#!/usr/bin/env python3
"""Joins src/ into the two files that users copy. Standard library only; run from the repository's root.

    tools/join.py                     writes tinytrain.h and tinytrain_cuda.cu
    tools/join.py --check             compares them with src/ and fails if they differ
    tools/join.py --lines --out DIR   writes them into DIR with #line: compilers name the files of src/

src/tinytrain.h and src/tinytrain_cuda.cu are the roots: each `#include "folder/file"` of a root is replaced
by that file without its head, after a line with its name; an empty line parts two files. The head of a file is all that stands before
its first empty line: a guard, and the includes of what the file uses. A file may include only what its root
has joined before it.
"""
import argparse
import os
import re
import sys

ROOTS = ("tinytrain.h", "tinytrain_cuda.cu")
INCLUDE = re.compile(r'\s*#\s*include "([^"]+)"')


def read(path):
    with open(os.path.join("src", path), encoding="utf-8") as file:
        return file.read().split("\n")[:-1]


def includes(head, path):
    """The files, relative to src/, that lines of a file's head include."""
    found = (INCLUDE.match(line) for line in head)
    return [os.path.normpath(os.path.join(os.path.dirname(path), m.group(1))) for m in found if m]


def split(path):
    """A file's head and its body, and the number of the body's first line."""
    lines = read(path)
    end = lines.index("") if "" in lines else len(lines)
    return lines[:end], lines[end + 1:], end + 2


def check_heads(path, head, joined):
    """Fails unless what a head includes is joined; of a file without a body, what that includes."""
    for used in includes(head, path):
        if used in joined or used in ROOTS:
            continue
        if not os.path.isfile(os.path.join("src", used)):
            sys.exit(f"join: src/{path} includes src/{used}, which is not there")
        inner, body, _ = split(used)
        if body:
            sys.exit(f"join: src/{path} includes src/{used}, which its root joins later or not at all")
        check_heads(used, inner, joined)


def join(root, joined, with_lines):
    out, after_file = [], False
    for number, line in enumerate(read(root), 1):
        m = INCLUDE.match(line)
        path = m.group(1) if m else None
        if path is None or path in ROOTS: # tinytrain_cuda.cu includes the header as users do
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


def main():
    parser = argparse.ArgumentParser(description="Joins src/ into tinytrain.h and tinytrain_cuda.cu.")
    parser.add_argument("--check", action="store_true", help="compare, and fail if they differ")
    parser.add_argument("--lines", action="store_true", help="write #line, for a developer's build")
    parser.add_argument("--out", default=".", metavar="DIR", help="the folder of the two files")
    options = parser.parse_args()
    joined, differ = set(), []
    for root in ROOTS:
        text, path = join(root, joined, options.lines), os.path.join(options.out, root)
        old = open(path, encoding="utf-8").read() if os.path.isfile(path) else None
        if text != old and options.check:
            differ.append(root)
        elif text != old:
            with open(path, "w", encoding="utf-8") as file:
                file.write(text)
    if differ:
        sys.exit(f"join: {' and '.join(differ)} differ from src/: run tools/join.py, and edit src/ only")


if __name__ == "__main__":
    main()
