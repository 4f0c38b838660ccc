#!/usr/bin/env python3
"""Writes the Unicode tables that BERT's basic tokenizer needs, as C, from Python's unicodedata.

    python tests/golden/make_unicode.py                     C tables to stdout
    python tests/golden/make_unicode.py --dump              "code point, classes, folded" for every code point, for a C test
    python tests/golden/make_unicode.py --compare           where the Hugging Face `tokenizers` package decides otherwise

Tables (all sorted, ranges inclusive):
    tt__mn_ranges       category Mn, dropped when accents are stripped
    tt__control_ranges  categories Cc Cf Co Cs but for \\t \\n \\r: dropped when text is cleaned
    tt__punct_ranges    categories P* and the ASCII symbols $ + < = > ^ ` | ~ : each is a word of its own
    tt__fold_*          lower(NFD(c) without Mn), where that differs from c; c itself not Mn, not a Hangul syllable:
        runs            first, last, stride, to, step: c -> to + (c - first) / stride * step, when stride divides c - first
        cjk_f900, cjk_2f800   direct arrays for the two blocks of CJK compatibility ideographs
        many            c -> two or three code points (0 ends)
    Hangul syllables (U+AC00..U+D7A3) decompose by arithmetic, see hangul().
"""
import argparse
import sys
import unicodedata

ALL = range(0x110000)
CJK_BLOCKS = ((0xF900, 0xFAFF), (0x2F800, 0x2FA1F))


def category(c):
    return unicodedata.category(chr(c))


def is_mn(c):
    return category(c) == "Mn"


def is_control(c):
    return category(c) in ("Cc", "Cf", "Co", "Cs") and c not in (9, 10, 13)


def is_punct(c):
    return category(c)[0] == "P" or 33 <= c <= 47 or 58 <= c <= 64 or 91 <= c <= 96 or 123 <= c <= 126


def fold(c):
    """lower(NFD(c) without Mn) as a tuple of code points; lower-casing looks at one character at a time (no final-sigma rule)"""
    if 0xD800 <= c <= 0xDFFF:
        return (c,)
    kept = [x for x in unicodedata.normalize("NFD", chr(c)) if unicodedata.category(x) != "Mn"]
    return tuple(ord(y) for x in kept for y in x.lower())


def hangul(c):
    s = c - 0xAC00
    t = s % 28
    return (0x1100 + s // 588, 0x1161 + s % 588 // 28) + ((0x11A7 + t,) if t else ())


def ranges(test):
    out = []
    for c in ALL:
        if test(c):
            if out and out[-1][1] == c - 1:
                out[-1][1] = c
            else:
                out.append([c, c])
    return out


def fold_tables():
    one, many = {}, {}
    for c in ALL:
        f = fold(c)
        if 0xAC00 <= c <= 0xD7A3:
            assert f == hangul(c)
        elif f and f != (c,):
            (one if len(f) == 1 else many)[c] = f
    blocks = [[one.pop(c, (c,))[0] for c in range(a, b + 1)] for a, b in CJK_BLOCKS]
    assert all(len(f) <= 3 for f in many.values())
    # greedy: from the smallest code point not yet covered, the longest run of any stride and step. A run's gaps belong to others.
    runs, left = [], {c: f[0] for c, f in one.items()}
    for c in sorted(one):
        if c not in left:
            continue
        best = (0, 1, 0)
        for stride in (1, 2):
            for step in (0, 1, 2):
                n = 1
                while left.get(c + n * stride) == left[c] + n * step:
                    n += 1
                if n > best[0]:
                    best = (n, stride, step)
        n, stride, step = best
        runs.append((c, c + (n - 1) * stride, stride, left[c], step))
        for i in range(n):
            del left[c + i * stride]
    return runs, blocks, many


def lookup(c, tables):
    """What the C code does with the tables; used to check them."""
    runs, blocks, many = tables
    if 0xAC00 <= c <= 0xD7A3:
        return hangul(c)
    for (a, b), block in zip(CJK_BLOCKS, blocks):
        if a <= c <= b:
            return (block[c - a],)
    if c in many:
        return many[c]
    for first, last, stride, to, step in runs:
        if first <= c <= last and (c - first) % stride == 0:
            return (to + (c - first) // stride * step,)
    return (c,)


def emit(kind, name, cells, width=118):
    print(f"static const {kind} {name} = {{")
    line = "   "
    for cell in cells:
        if len(line) + len(cell) + 2 > width:
            print(line)
            line = "   "
        line += " " + cell + ","
    print(line + "\n};")


def h(x):
    return f"0x{x:X}" if x > 9 else str(x)


def write_tables():
    runs, blocks, many = tables = fold_tables()
    for c in ALL:
        if not is_mn(c) and not 0xD800 <= c <= 0xDFFF:
            assert lookup(c, tables) == fold(c), hex(c)
    print(f"/* Unicode {unicodedata.unidata_version}, written by tests/golden/make_unicode.py; do not edit. Ranges are inclusive and sorted. */\n")
    for name, test, text in (("mn", is_mn, "category Mn: what stripping accents drops"),
                             ("control", is_control, "Cc Cf Co Cs, but for tab, line feed and carriage return: what cleaning drops"),
                             ("punct", is_punct, "category P and the ASCII symbols: each a word of its own")):
        print(f"/* {text} */")
        emit("uint32_t", f"tt__{name}_ranges[][2]", ["{%s,%s}" % (h(a), h(b)) for a, b in ranges(test)])
        print()
    print("/* lower(NFD(c) without Mn) where it differs from c. A run maps c to to + (c - first) / stride * step when stride divides\n"
          "   c - first; runs are sorted by first and may interleave (stride 2), so a search looks back over runs that start before c. */")
    overlap = max(sum(1 for q in runs[:i] if q[1] > r[0]) for i, r in enumerate(runs))
    reach = max(i - min([j for j in range(i) if runs[j][1] > runs[i][0]] or [i]) for i in range(len(runs)))
    longest = max(r[1] - r[0] for r in runs)
    print(f"/* {len(runs)} runs; no more than {overlap} overlap; one that covers c starts at most {reach} entries before the last with first <= c */")
    print(f"enum {{ TT__FOLD_LOOK_BACK = {reach} }};")
    emit("struct { uint32_t first, last; uint8_t stride, step; uint32_t to; }", "tt__fold_runs[]",
         ["{%s,%s,%d,%d,%s}" % (h(a), h(b), stride, step, h(to)) for a, b, stride, to, step in runs])
    for (a, b), block in zip(CJK_BLOCKS, blocks):
        print(f"\n/* U+{a:X}..U+{b:X}: CJK compatibility ideographs (0: itself) */")
        emit("uint32_t", f"tt__fold_cjk_{a:x}[{b - a + 1}]", [h(0 if x == a + i else x) for i, x in enumerate(block)])
    print("\n/* c, then the two or three code points that it becomes */")
    emit("uint32_t", "tt__fold_many[][4]", ["{%s}" % ",".join(h(x) for x in ((c,) + f + (0,))[:4]) for c, f in sorted(many.items())])


def dump():
    for c in ALL:
        if 0xD800 <= c <= 0xDFFF:
            continue
        print(c, int(is_mn(c)), int(is_control(c)), int(is_punct(c)), *(() if is_mn(c) else fold(c)))


def compare():
    """Code points where tokenizers' BertNormalizer and BertPreTokenizer differ from these tables: the two follow other versions of
    Unicode, and the package treats a few things on its own."""
    from tokenizers.normalizers import BertNormalizer
    from tokenizers.pre_tokenizers import BertPreTokenizer
    clean = BertNormalizer(clean_text=True, handle_chinese_chars=False, strip_accents=False, lowercase=False)
    both = BertNormalizer(clean_text=False, handle_chinese_chars=False, strip_accents=True, lowercase=True)
    strip = BertNormalizer(clean_text=False, handle_chinese_chars=False, strip_accents=True, lowercase=False)
    split = BertPreTokenizer()
    found = {}
    for c in ALL:
        if 0xD800 <= c <= 0xDFFF:
            continue
        text = "a" + chr(c) + "b"
        gone = clean.normalize_str(text) == "ab"
        if gone != (is_control(c) or c in (0, 0xFFFD)):
            found.setdefault(f"reference {'drops' if gone else 'keeps'} when cleaning ({category(c)})", []).append(c)
        if gone:
            continue
        gone = strip.normalize_str(text) == "ab"
        if gone != is_mn(c):
            found.setdefault(f"reference {'drops' if gone else 'keeps'} when stripping ({category(c)})", []).append(c)
        elif not gone:
            theirs = tuple(map(ord, both.normalize_str(text)[1:-1]))
            if theirs != fold(c):
                found.setdefault(f"reference folds otherwise ({category(c)})", []).append(c)
        words = [w for w, _ in split.pre_tokenize_str(text)]
        kind = {1: "letter", 2: "space", 3: "punctuation"}[len(words)]
        mine = "punctuation" if is_punct(c) else "space" if c in SPACES else "letter"
        if kind != mine:
            found.setdefault(f"reference: {kind}, tables: {mine} ({category(c)})", []).append(c)
    for what, cs in sorted(found.items()):
        out = []
        for c in cs:
            if out and out[-1][1] == c - 1:
                out[-1][1] = c
            else:
                out.append([c, c])
        print(f"{what}: {len(cs)}: " + " ".join(f"{a:X}" if a == b else f"{a:X}-{b:X}" for a, b in out))


# property White_Space; after cleaning, only those outside Cc can still occur
SPACES = {9, 10, 11, 12, 13, 32, 0x85, 0xA0, 0x1680, *range(0x2000, 0x200B), 0x2028, 0x2029, 0x202F, 0x205F, 0x3000}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dump", action="store_true")
    parser.add_argument("--compare", action="store_true")
    args = parser.parse_args()
    dump() if args.dump else compare() if args.compare else write_tables()
