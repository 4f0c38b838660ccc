#!/usr/bin/env python3
"""Checks the plain English that CONTRIBUTING.md ("Words") asks for. Standard library only; run from the
repository's root.

    python3 tests/check_text.py          the checks
    python3 tests/check_text.py --list   each place that counts, as FILE:LINE: PATTERN: the text

comments_of_AREA: none of PATTERNS matches a sentence of a comment of the area (a folder, or the Markdown
files).

messages_of_AREA: none of PATTERNS matches a string of two words or more in the area's C files: errors,
warnings, usage texts, what programs print.

words_of_README: README.md has at most README_WORDS words outside of code, its tables included.

lines_of_CHANGELOG: CHANGELOG.md has at most CHANGELOG_LINES lines.

options_say_when: each field of OPTIONS, in src/api/, has a comment, which says when a user sets the field:
the comment begins with SAYS_WHEN.

reads_itself: the readers of messages and of README.md give what CASES expect.
"""
import glob
import os
import re
import sys
import tempfile

# Patterns of sentences without a subject, and of phrases that comments must not use. Each pattern
# is searched in each sentence of a comment, with its lines joined and its marks removed.
PATTERNS = {name: re.compile(pattern) for name, pattern in (
    ("begins with What", r"^What\b(?! happens)"),
    ("begins with Of", r"^Of (?!course)"),
    ("begins with The same", r"^(?:The|Does the) same(?: of|,|\.|;|:|$| for| with| as| by| in| to)"),
    ("begins with As", r"^As (?:\S+(?:'s|s')(?:\.|,|;|$| \w+\.)|(?:before|above|below|tt_\w+)\b)"),
    ("begins with Same", r"^(?:Same|Such (?:are|is)|So (?:much|many)|Nor)\b"),
    ("begins with How", r"^How\b.*(?<!\?)$"),
    ("does so", r"\b(?:[Dd]oes|did) so\b"),
    ("begins with That", r"^(?:That|Those) (?:of|for|with|by|are|is|in|which|that)\b"),
    ("begins with Where", r"^(?:Where|Who|Whose)\b.*(?<!\?)$"),
    ("so many", r"\b(?:so (?:many|much)|as many as there)\b(?! (?:that|as)\b)"),
    ("has not", r"\b(?:has|have|had) not\b(?! (?:yet |to )?\w+(?:ed|en|un|ne|pt|et|it|me|ft)\b)"),
    ("of which none", r"\bof which (?:none|one|each|there)\b"),
    ("goes on on", r"\b(on|of|for|to|in|the|is|it|a|as|are|by) \1\b"),
    ("there is none", r"(?<!if )\bthere (?:is|are) none (?!there)\w"),
    ("in front of", r"\bin front of\b"),
    ("none of that", r"\bnone of (?:that|those)\b"),
    ("behind", r"(?<!queue )\bbehind\b"),
    ("beside", r"\bbeside (?:\w+'s?\b|PyTorch|torch|others?\b|each other|what\b|the (?:least|forecast)\b)"),
    ("as else", r"\b(?:as|than) else\b"),
    ("at hand", r"\bat hand\b"),
    ("gives way", r"\b(?:gives?|gave) way\b"),
    ("such as has", r"\bsuch (?:as|an?) (?:is|are|has|have)\b"),
    ("stands in", r"\b(?:stands? (?:in(?! for)|at|before|between|beside|there|one|together)|stood)\b"))}
# Ends of sentences: a mark, and a capital after a space. The exceptions are abbreviations.
SENTENCE = re.compile(r"(?<!\be\.g\.)(?<!\bi\.e\.)(?<!\bet al\.)(?<!\bvs\.)(?<=[.!?:;])\s+(?=[A-Z])")
README_WORDS = 900
CHANGELOG_LINES = 80
# The structs whose fields users set, and what the comment of such a field says first.
OPTIONS = re.compile(r"struct (tt_(?:\w+_options|sampling|parallel|schedule|loss_scale|wording)) \{(.*?)^\}",
                     re.M | re.S)
SAYS_WHEN = re.compile(r"argument of|(?:Set|Clear)\b"
                       r"(?! (?:it|them|its fields) to (?:change|choose|force|limit|provide|replace|turn)\b)")
SOURCES = ("*.h", "*.c", "*.cuh", "*.cu", "*.cpp", "*.py", "*.sh", "*.mk")
AREAS = {
    "src": [f"src/**/{kind}" for kind in SOURCES],
    "examples": [f"examples/{kind}" for kind in SOURCES] + ["examples/data/*.py"],
    "tests": [f"tests/**/{kind}" for kind in SOURCES] + ["tests/**/CMakeLists.txt"],
    "bench": [f"bench/**/{kind}" for kind in SOURCES],
    "tools": [f"tools/{kind}" for kind in SOURCES] + [".ci/run", "Makefile", "CMakeLists.txt"],
    "Markdown": ["*.md", "docs/**/*.md", "bench/**/*.md"]}
C = re.compile(r'/\*(.*?)\*/|((?:(?<=\n)[ \t]*)?//[^\n]*(?:\n[ \t]*//[^\n]*)*)|"(?:\\.|[^"\\\n])*"|'
               r"'(?:\\.|[^'\\\n])*'", re.S)
LITERAL = re.compile(r'/\*.*?\*/|//[^\n]*|^[ \t]*#[ \t]*include[^\n]*|\'(?:\\.|[^\'\\\n])*\'|'
                     r'"((?:\\.|[^"\\\n])*)"', re.S | re.M)
HASH = re.compile(r'"""(.*?)"""|((?:(?<=\n)[ \t]*)?(?<![\\$&{\'"#\w])#(?!!)[^\n]*(?:\n[ \t]*#[^\n]*)*)|'
                  r'"(?:\\.|[^"\\\n])*"', re.S)


def comments(path):
    """Yields (line, text) of each comment of a file; of Markdown, of each paragraph, list item and row."""
    with open(path, encoding="utf-8") as f:
        text = f.read()
    if path.endswith(".md"):
        text = re.sub(r"^```.*?^```", lambda m: "\n" * m.group(0).count("\n"), text, flags=re.M | re.S)
        text = re.sub(r"(?m)^#.*$", "", text) # headings
        found = re.finditer(r"(?:^[ \t]*(?:[-*>|]|\d+\.).*\n(?:^  +\S.*\n)*|(?:^.*\S.*\n)+?(?=\s*\n|[-*|#]))",
                            text + "\n", re.M)
        pieces = ((m.start(), m.group(0)) for m in found)
    else:
        pattern = C if path.endswith((".h", ".c", ".cuh", ".cu", ".cpp")) else HASH
        pieces = ((m.start(), m.group(1) or m.group(2)) for m in pattern.finditer(text)
                  if m.group(1) or m.group(2))
    for start, piece in pieces:
        words = re.sub(r"`[^`\n]*`|\*\w+", "X", re.sub(r"(?m)^\s*(?://+|#+|[-*>|])+ ?|\s*\\$", " ", piece))
        yield text.count("\n", 0, start) + 1, " ".join(words.split()).lstrip("-*=# ")


def messages(path):
    """Yields (line, text) of each message in a C file: string literals with nothing but PRI macros between
    them, cut where a flag of a usage text begins. A conversion such as %s counts as the word X."""
    with open(path, encoding="utf-8") as f:
        text = f.read()
    parts, last = [], -1
    for m in LITERAL.finditer(text):
        if not m.group(1):
            continue
        between = text[last:m.start()]
        if parts and re.fullmatch(r"(?:\s|\\\n|PRI\w+)*", between):
            parts[-1][1] += "d" * ("PRI" in between) + m.group(1)
        else:
            parts.append([text.count("\n", 0, m.start()) + 1, m.group(1)])
        last = m.end()
    for line, said in parts:
        said = re.sub(r"%[-+ 0#]*(?:\d+|\*)?(?:\.(?:\d+|\*))?[hlzj]*[diuxcsfgeaGEp]", " X ", said)
        for entry in re.split(r"\\n *(?=--)|\\n\\n", said):
            plain = re.sub(r"\\[nrt]", " ", entry).replace('\\"', '"')
            words = " ".join(re.sub(r"^ *--[a-z0-9-]+(?: [A-Z:*]+)? ", "", plain).split())
            if " " in words:
                yield line, words


def findings(patterns, texts):
    for glob_of in patterns:
        for path in sorted(glob.glob(glob_of, recursive=True)):
            if path.startswith(("tests/golden/data", "bench/results/gpu_")):
                continue
            for line, text in texts(path):
                for sentence in SENTENCE.split(text):
                    for name, pattern in PATTERNS.items():
                        if pattern.search(sentence):
                            yield path, line, name, sentence


def words_of_readme(path="README.md"):
    """Counts words outside of code blocks, without marks and the addresses of links."""
    with open(path, encoding="utf-8") as f:
        text = re.sub(r"(?ms)^```.*?^```", "", f.read())
    text = text.replace("|", " ")
    words = re.sub(r"\]\([^)]*\)", "]", text).split()
    return sum(bool(re.search(r"\w", word)) for word in words)


def options(path):
    """Yields (line, struct, comment) of each comment in an options struct that does not say when to set a
    field, and (line, struct, field) of each field without a comment above or after the field."""
    with open(path, encoding="utf-8") as f:
        text = f.read()
    for struct in OPTIONS.finditer(text):
        above = False # a comment above the next field
        for m in re.finditer(r"(^ *)?/\*(.*?)\*/|([^;/]+;)", struct[2], re.S | re.M):
            said = " ".join((m[2] or m[3]).split())
            after = re.match(r" */\*", struct[2][m.end():])
            if (m[2] and not SAYS_WHEN.match(said)) or (m[3] and not above and not after):
                at = m.start() + len(m[0]) - len(m[0].lstrip())
                yield text.count("\n", 0, struct.start(2) + at) + 1, struct[1], said
            above = m[1] is not None


# Files and what a reader must give for them: (name, text, function, result).
CASES = [
    ("joined.c", 'tt__fail(c, "one %s "\n    "of %" PRId64\n    " dots"); puts("word"); // "a comment"\n',
     lambda path: list(messages(path)), [(1, "one X of X dots")]),
    ("marks.c", "#include \"a b.h\"\nchar c = '\"'; puts(\"a \\\"b\\\" c\\n\"); /* \"d e\" */\n",
     lambda path: list(messages(path)), [(2, 'a "b" c')]),
    ("usage.c", 'puts("  --a N  a number\\n  --b    The same of b\\n");\n',
     lambda path: [found[1:3] for found in findings([path], messages)], [(1, "begins with The same")]),
    ("faults.c", 'f("rank %d has not %s"); g("%s stands before %s");\n/* The rank has not waited. */\n',
     lambda path: [found[2] for found in findings([path], messages)], ["has not", "stands in"]),
    ("later.h",
     "/* Returns x. What is read is kept.\n   Same, e.g. As before. As tt_b does, a lies behind b. */\n",
     lambda path: [found[2] for found in findings([path], comments)],
     ["begins with What", "begins with Same", "begins with As", "behind"]),
    ("options.h", "typedef struct tt_a_options {\n    int a; /* Set it if a. */\n"
     "    int bare;\n    /* Set it to change b. */\n    int b;\n} tt_a_options;\n"
     "struct tt_c {\n    int c; /* c */\n};\n",
     lambda path: list(options(path)),
     [(3, "tt_a_options", "int bare;"), (4, "tt_a_options", "Set it to change b.")]),
    ("readme.md", "# Two words\n\n[three four](a/b c)\n\n| a | b |\n| --- | --- |\n| five six | yes |\n\n"
     "```sh\nmake it\n```\n", words_of_readme, 9)]


def misread():
    """Returns a sentence for each of CASES that a reader reads wrong."""
    wrong = []
    with tempfile.TemporaryDirectory() as folder:
        for name, text, read, result in CASES:
            path = os.path.join(folder, name)
            with open(path, "w", encoding="utf-8") as f:
                f.write(text)
            if read(path) != result:
                wrong.append(f"{name} gives {read(path)}, expected {result}")
    return wrong


def main():
    wrong = {} # the reason why a check fails, or ""
    readings = [(f"comments_of_{area}", patterns, comments) for area, patterns in AREAS.items()]
    for area in ("src", "examples"):
        in_c = [pattern for pattern in AREAS[area] if not pattern.endswith((".py", ".sh", ".mk"))]
        readings.append((f"messages_of_{area}", in_c, messages))
    for name, patterns, texts in readings:
        found = list(findings(patterns, texts))
        if "--list" in sys.argv[1:]:
            for path, line, pattern, text in found:
                print(f"{path}:{line}: {pattern}: {text[:120]}")
        shown = "; ".join(f"{path}:{line} ({pattern})" for path, line, pattern, _ in found[:10])
        wrong[name] = f"{len(found)} places: {shown}; --list shows all" if found else ""
    if "--list" in sys.argv[1:]:
        return
    wrong["options_say_when"] = ", ".join(f"{path}:{line}" for path in sorted(glob.glob("src/api/*.h"))
                                          for line, _, _ in options(path))
    words = words_of_readme()
    wrong["words_of_README"] = (f"{words} words, {README_WORDS} allowed: move text to docs/"
                                if words > README_WORDS else "")
    with open("CHANGELOG.md", encoding="utf-8") as f:
        lines = f.read().count("\n")
    wrong["lines_of_CHANGELOG"] = (f"{lines} lines, {CHANGELOG_LINES} allowed" if lines > CHANGELOG_LINES
                                   else "")
    wrong["reads_itself"] = "; ".join(misread())
    for name, why in wrong.items():
        print(f"FAILED {name}: {why}" if why else f"ok {name}")
    failed = sum(bool(why) for why in wrong.values())
    print(f"{len(wrong) - failed} passed, {failed} failed")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
