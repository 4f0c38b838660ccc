#!/usr/bin/env python3
"""Checks that what is known of an op stands in one place: outside of the section >>ops, where its rules are,
and >>cpu, where its kernels are, nothing in tinytrain.h asks which op an instruction is. What passes, plans
and runs must know is a flag of its row or one of its rules (see CONTRIBUTING.md, "Add an op"). Standard
library only; run from the repository's root.
"""
import re
import sys

HOMES = ("ops", "cpu")
ASKS = re.compile(r"[=!]= *TT__OP_[A-Z]|\bTT__OP_[A-Z_]+ *[=!]=|\bcase TT__OP_[A-Z]")


def places(text):
    """lines outside of the homes of ops that ask for one: (number, section, line)"""
    section = "manual"
    for number, line in enumerate(text.split("\n"), 1):
        banner = re.match(r"   [A-Z ]+ >>(\w+)$", line)
        section = banner.group(1) if banner else section
        if section not in HOMES and ASKS.search(line):
            yield number, section, line.strip()


example = "   PASSES   >>passes\nif (i->op == TT__OP_ADD) {\n   OPS   >>ops\ncase TT__OP_ADD: {\n"
assert [p[0] for p in places(example)] == [2]
found = list(places(open("tinytrain.h", encoding="utf-8").read()))
for number, section, line in found:
    print(f"tinytrain.h:{number}: >>{section} asks for an op: {line}")
print(f"FAILED ops_in_one_place: {len(found)} places" if found else "ok ops_in_one_place")
print(f"1 checks: {int(not found)} passed, {int(bool(found))} failed")
sys.exit(bool(found))
