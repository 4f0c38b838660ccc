#!/usr/bin/env python3
"""Checks the order of tinytrain.h. Standard library only; run from the repository's root.

ops_in_one_place: outside of the section >>ops, where the rules of ops are, and >>cpu, where their kernels
are, nothing asks which op an instruction is. What passes, plans and runs must know is a flag of its row or
one of its rules (see CONTRIBUTING.md, "Add an op").

nothing_reaches_upward: a section uses no function or table of one below it, but for the declarations at the
beginning.
"""
import re
import sys

HOMES = ("ops", "cpu")
ASKS = re.compile(r"[=!]= *TT__OP_[A-Z]|\bTT__OP_[A-Z_]+ *[=!]=|\bcase TT__OP_[A-Z]")
DECLARE = ("manual", "api", "backend")
FUNCTION = re.compile(r"(?:\w+ )*\w+[ *]+(?:TT__K\()?(tt__?\w+)\)?\(")
TABLE = re.compile(r"static const [\w *]+?\b(tt__\w+)(?:\[.*\])? = \{")


def sections(text):
    """[(section, line)] without comments and strings"""
    found, section = [], "manual"
    blank = lambda m: re.sub(r"[^\n]", " ", m.group(0))
    code = re.sub(r'/\*.*?\*/|"(?:\\.|[^"\\\n])*"', blank, text, flags=re.S)
    for line, bare in zip(text.split("\n"), code.split("\n")):
        banner = re.match(r"   [A-Z ]+ >>(\w+)$", line)
        section = banner.group(1) if banner else section
        found.append((section, bare))
    return found


def asks(lines):
    return [(n, f">>{s} asks for an op: {line.strip()}") for n, (s, line) in enumerate(lines, 1)
            if s not in HOMES and ASKS.search(line)]


def reaches(lines):
    order = {s: k for k, s in enumerate(dict.fromkeys(s for s, _ in lines))}
    home, found = {}, []
    for n, (section, line) in enumerate(lines):
        m = FUNCTION.match(line) or TABLE.match(line)
        head = " ".join(bare for _, bare in lines[n:n + 12]).split(";")[0] if m else ""
        if "{" in head:
            home.setdefault(m.group(1), section)
    for n, (section, line) in enumerate(lines, 1):
        for name in re.findall(r"\btt__?\w+\b", line) if section not in DECLARE else []:
            there = home.get(name, section)
            if order[there] > order[section]:
                found.append((n, f">>{section} uses {name} of >>{there}"))
    return found


example = sections("   PASSES   >>passes\nif (i->op == TT__OP_ADD) tt__low();\nint tt__high(int x)\n{\n}\n"
                   "   OPS   >>ops\nint tt__low(void)\n{\n    tt__high(1); /* case TT__OP_ADD: */\n}\n")
assert [n for n, _ in asks(example)] == [2] and [n for n, _ in reaches(example)] == [2]
header = sections(open("tinytrain.h", encoding="utf-8").read())
failed = 0
for name, places in (("ops_in_one_place", asks(header)), ("nothing_reaches_upward", reaches(header))):
    for number, what in places:
        print(f"tinytrain.h:{number}: {what}")
    print(f"FAILED {name}: {len(places)} places" if places else f"ok {name}")
    failed += bool(places)
print(f"2 checks: {2 - failed} passed, {failed} failed")
sys.exit(failed > 0)
