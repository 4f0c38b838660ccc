#!/usr/bin/env python3
"""Checks the plain English that CONTRIBUTING.md ("Words") asks for. Standard library only; run from the
repository's root.

    python3 tests/check_text.py          the checks
    python3 tests/check_text.py --list   each place that counts, as FILE:LINE: PATTERN: the comment

comments_of_AREA: none of PATTERNS matches a comment of the area (a folder, or the Markdown files).

words_of_README: README.md has at most README_WORDS words outside of code and tables.

lines_of_CHANGELOG: CHANGELOG.md has at most CHANGELOG_LINES lines.
"""
import glob
import re
import sys

# Patterns of sentences without a subject, and of phrases that comments must not use. Each pattern
# is searched in the text of a comment, with its lines joined and its marks removed.
PATTERNS = {name: re.compile(pattern) for name, pattern in (
    ("begins with What", r"^What\b(?! happens)"),
    ("begins with Of", r"^Of (?!course)"),
    ("begins with The same", r"^(?:The|Does the) same(?: of|,|\.|;|:|$| for| with| as| by| in| to)"),
    ("begins with As", r"^As \S+(?:'s|s')(?:\.|,|;|$| \w+\.)"),
    ("begins with That", r"^(?:That|Those) (?:of|for|with|by|are|is|in|which|that)\b"),
    ("begins with Where", r"^(?:Where|Who|Whose)\b.*(?<!\?)$"),
    ("so many", r"\b(?:so (?:many|much)|as many as there)\b(?! (?:that|as)\b)"),
    ("has not", r"\b(?:has|have|had) not\b(?! (?:yet |to )?\w+(?:ed|en|un|ne|pt|et|it|me|ft)\b)"),
    ("of which none", r"\bof which (?:none|one|each|there)\b"),
    ("goes on on", r"\b(on|of|for|to|in|the|is|it|a|as|are|by) \1\b"),
    ("there is none", r"(?<!if )\bthere (?:is|are) none (?!there)\w"),
    ("in front of", r"\bin front of\b"),
    ("behind", r"\bbehind (?:it|them|that|those|these|which|each other)\b"),
    ("as else", r"\bas else\b"),
    ("at hand", r"\bat hand\b"),
    ("gives way", r"\b(?:gives?|gave) way\b"),
    ("one behind the other", r"\bone behind (?:the other|another)\b"),
    ("such as has", r"\bsuch (?:as|an?) (?:is|are|has|have)\b"),
    ("stands in", r"\bstands? (?:in(?! for)|at|behind|before|there)\b"))}
README_WORDS = 900
CHANGELOG_LINES = 80
SOURCES = ("*.h", "*.c", "*.cuh", "*.cu", "*.cpp", "*.py", "*.sh", "*.mk")
AREAS = {
    "src": [f"src/**/{kind}" for kind in SOURCES],
    "examples": [f"examples/{kind}" for kind in SOURCES],
    "tests": [f"tests/**/{kind}" for kind in SOURCES],
    "bench": [f"bench/**/{kind}" for kind in SOURCES],
    "tools": [f"tools/{kind}" for kind in SOURCES] + [".ci/run", "Makefile"],
    "Markdown": ["*.md", "docs/**/*.md", "bench/**/*.md"]}
C = re.compile(r'/\*(.*?)\*/|((?:(?<=\n)[ \t]*)?//[^\n]*(?:\n[ \t]*//[^\n]*)*)|"(?:\\.|[^"\\\n])*"|'
               r"'(?:\\.|[^'\\\n])*'", re.S)
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


def findings(patterns):
    for glob_of in patterns:
        for path in sorted(glob.glob(glob_of, recursive=True)):
            if path.startswith(("tests/golden/data", "bench/results/gpu_")):
                continue
            for line, text in comments(path):
                for name, pattern in PATTERNS.items():
                    if pattern.search(text):
                        yield path, line, name, text


def words_of_readme():
    with open("README.md", encoding="utf-8") as f:
        text = re.sub(r"(?ms)^```.*?^```|^\|.*?$", "", f.read())
    return len(re.sub(r"\]\([^)]*\)", "]", text).split())


def main():
    passed = failed = 0
    for area, patterns in AREAS.items():
        found = list(findings(patterns))
        if "--list" in sys.argv[1:]:
            for path, line, name, text in found:
                print(f"{path}:{line}: {name}: {text[:120]}")
            continue
        shown = "; ".join(f"{path}:{line} ({name})" for path, line, name, _ in found[:10])
        why = f"{len(found)} places: {shown}; --list shows all" if found else ""
        print(f"FAILED comments_of_{area}: {why}" if why else f"ok comments_of_{area}")
        passed, failed = passed + (not why), failed + bool(why)
    if "--list" not in sys.argv[1:]:
        words = words_of_readme()
        wrong = f"{words} words, {README_WORDS} allowed: move text to docs/" if words > README_WORDS else ""
        print(f"FAILED words_of_README: {wrong}" if wrong else "ok words_of_README")
        passed, failed = passed + (not wrong), failed + bool(wrong)
        with open("CHANGELOG.md", encoding="utf-8") as f:
            lines = f.read().count("\n")
        wrong = f"{lines} lines, {CHANGELOG_LINES} allowed" if lines > CHANGELOG_LINES else ""
        print(f"FAILED lines_of_CHANGELOG: {wrong}" if wrong else "ok lines_of_CHANGELOG")
        passed, failed = passed + (not wrong), failed + bool(wrong)
        print(f"{passed} passed, {failed} failed")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
