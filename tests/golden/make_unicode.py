#!/usr/bin/env python3
"""Writes the Unicode tables of BERT's tokenizer as C, from what the `tokenizers` package does to code points.

    python tests/golden/make_unicode.py     C tables to stdout, for the section "Unicode" of tinytrain.h

needs: tokenizers (Hugging Face), the reference for what a control character, a space, punctuation or an
accent is. It follows several versions of Unicode, one for each Rust crate that it is built from, so no table
of another source equals it. compare_tokens.py checks the tables, and the C code that reads them, against it.

The first cell of a row in each table is first << 11 | more, and rows are sorted by it:
    tt__class_ranges    more = last - first (7 bits) << 4 | class. No row: a letter, or private use (dropped)
    tt__fold_*          lower(NFD(c) without accents) where that is not c; c is no accent and not Hangul:
        runs            more = last - first (8 bits) << 3 | kind (kind = stride * 3 - 3 + step), then to:
                        c -> to + (c - first) / stride * step, when stride divides c - first
        cjk_f900, cjk_2f800   direct arrays for the two blocks of CJK compatibility ideographs
        many            more = 0, then two or three code points (0 ends)
    Hangul syllables (U+AC00..U+D7A3) decompose by arithmetic, see hangul().
"""
import importlib.metadata

from tokenizers.normalizers import NFD, BertNormalizer
from tokenizers.pre_tokenizers import BertPreTokenizer

ALL = [c for c in range(0x110000) if not 0xD800 <= c <= 0xDFFF]
CJK_BLOCKS = ((0xF900, 0xFAFF), (0x2F800, 0x2FA1F))
HANGUL = range(0xAC00, 0xD7A4)
# In the order of the enum in tinytrain.h. "mark" is the first of several classes, sorted as NFD sorts them.
CLASSES = ["letter", "space", "drop", "punctuation", "accent", "starter accent", "mark"]

CLEAN, CHINESE, STRIP, FOLD = (
    BertNormalizer(clean_text=i == 0, handle_chinese_chars=i == 1, strip_accents=i >= 2, lowercase=i == 3)
    for i in range(4))


def nfd(*points):
    return NFD().normalize_str("".join(map(chr, points)))


def is_reordered(c):
    """Whether c is no starter: then U+0334, of the lowest, moves over c to before U+0345, of the highest."""
    order = nfd(0x345, c, 0x334)
    return order.index("\u0334") < order.index("\u0345")


def probe():
    """{code point: class} without letters, {code point: fold} of what is kept, and what is Chinese"""
    kinds, folds, chinese = {}, {}, []
    words = BertPreTokenizer()
    for c in ALL:
        text = f"a{chr(c)}b"
        clean = CLEAN.normalize_str(text)
        if clean in ("ab", "a b"):
            kinds[c] = "drop" if clean == "ab" else "space"
            continue
        assert clean == text
        if CHINESE.normalize_str(text) != text:
            chinese.append(c)
        parts = len(words.pre_tokenize_str(text))
        assert parts in (1, 3), "white space that cleaning leaves"
        fold = tuple(map(ord, FOLD.normalize_str(text)[1:-1]))
        if STRIP.normalize_str(text) == "ab":
            assert parts == 1 and not fold, "an accent that is punctuation"
            kinds[c] = "accent" if is_reordered(c) else "starter accent"
            continue
        folds[c] = fold
        if parts == 3:
            kinds[c] = "punctuation"
        if is_reordered(c):
            assert c not in kinds and fold == (c,) and nfd(c) == chr(c), "a mark that is more than that"
            kinds[c] = "mark"
    gone = {c for c, kind in kinds.items() if kind in ("space", "drop", "accent", "starter accent")}
    marks = {c for c, kind in kinds.items() if kind == "mark"}
    for c, fold in folds.items():
        assert fold and not gone & set(fold), "a fold that needs a second look"
        assert not marks & set(fold) or len(fold) == len(nfd(c)), "an accent among the marks of a fold"
    return kinds, folds, chinese


def mark_classes(marks):
    """{mark: 0 for the lowest combining class among them, 1 for the next ...}"""
    below = {c: sum(nfd(c, d) != chr(c) + chr(d) for d in marks) for c in marks}
    return {c: sorted(set(below.values())).index(n) for c, n in below.items()}


def is_private(c):
    """What the C code drops without a table."""
    return 0xE000 <= c <= 0xF8FF or (c >= 0xF0000 and c & 0xFFFE != 0xFFFE)


def is_chinese(c):
    """tt__is_cjk of the C code."""
    return (0x4E00 <= c <= 0x9FFF or 0x3400 <= c <= 0x4DBF or 0xF900 <= c <= 0xFAFF or 0x20000 <= c <= 0x2A6DF
            or 0x2A700 <= c <= 0x2B81F or 0x2B920 <= c <= 0x2CEAF or 0x2F800 <= c <= 0x2FA1F)


def hangul(c):
    s = c - 0xAC00
    t = s % 28
    return (0x1100 + s // 588, 0x1161 + s % 588 // 28) + ((0x11A7 + t,) if t else ())


def class_table(kinds):
    marks = mark_classes([c for c, kind in kinds.items() if kind == "mark"])
    number = {c: CLASSES.index(kind) + marks.get(c, 0) for c, kind in kinds.items()}
    assert max(number.values()) < 16
    out = []
    for c, n in sorted(number.items()):
        if is_private(c):
            assert kinds[c] == "drop"
        elif out and out[-1][1:] == [c - 1, n] and c - out[-1][0] < 128:
            out[-1][1] = c
        else:
            out.append([c, c, n])
    assert all(is_private(c) <= (c in kinds) for c in ALL)
    return [first << 11 | (last - first) << 4 | n for first, last, n in out]


def fold_tables(folds):
    one, many = {}, {}
    for c, f in folds.items():
        if c in HANGUL:
            assert f == hangul(c)
        elif f != (c,):
            (one if len(f) == 1 else many)[c] = f
    blocks = [[one.pop(c, (c,))[0] for c in range(a, b + 1)] for a, b in CJK_BLOCKS]
    assert all(len(f) <= 3 for f in many.values())
    # Greedy: from the smallest code point left, the longest run of any stride and step; others fill its gaps.
    runs, left = [], {c: f[0] for c, f in one.items()}
    for c in sorted(one):
        if c not in left:
            continue
        best = (0, 1, 0)
        for stride in (1, 2):
            for step in (0, 1, 2):
                n = 1
                while n * stride < 256 and left.get(c + n * stride) == left[c] + n * step:
                    n += 1
                if n > best[0]:
                    best = (n, stride, step)
        n, stride, step = best
        runs.append((c, c + (n - 1) * stride, stride, left[c], step))
        for i in range(n):
            del left[c + i * stride]
    return runs, blocks, many


def emit(name, cells, width=110):
    print(f"static const uint32_t {name} = {{")
    line = "   "
    for cell in cells:
        if len(line) + len(cell) + 2 > width:
            print(line)
            line = "   "
        line += " " + cell + ","
    print(line + "\n};")


def h(x):
    return f"0x{x:X}" if x > 9 else str(x)


def main():
    kinds, folds, chinese = probe()
    assert chinese == [c for c in ALL if is_chinese(c)]
    runs, blocks, many = fold_tables(folds)
    version = importlib.metadata.version("tokenizers")
    print(f"/* Written by tests/golden/make_unicode.py from the package tokenizers {version} of Python.\n"
          "   A row begins with first << 11 | more, first being a code point; rows are sorted by it. */\n")
    print("/* more: last - first (7 bits) << 4 | class. Letters and private use are in no range. */")
    emit("tt__class_ranges[]", map(h, class_table(kinds)))
    reach = max(i - min([j for j in range(i) if runs[j][1] > runs[i][0]] or [i]) for i in range(len(runs)))
    print("\n/* What c becomes when decomposed (NFD), stripped of accents and lower-cased, if not c itself.\n"
          "   more: last - first (8 bits) << 3 | stride * 3 - 3 + step; then to: c becomes\n"
          "   to + (c - first) / stride * step when stride divides c - first. The run that holds c starts\n"
          f"   at most {reach} rows before the last one with first <= c. */")
    print(f"enum {{ TT__FOLD_LOOK_BACK = {reach} }};")
    emit("tt__fold_runs[][2]", ["{%s,%s}" % (h(a << 11 | (b - a) << 3 | stride * 3 - 3 + step), h(to))
                                for a, b, stride, to, step in runs])
    for (a, b), block in zip(CJK_BLOCKS, blocks):
        print(f"\n/* U+{a:X}..U+{b:X}: CJK compatibility ideographs (0: itself) */")
        emit(f"tt__fold_cjk_{a:x}[{b - a + 1}]", [h(0 if x == a + i else x) for i, x in enumerate(block)])
    print("\n/* more: 0; then the two or three code points that c becomes */")
    emit("tt__fold_many[][4]", ["{%s}" % ",".join(h(x) for x in ((c << 11,) + f + (0,))[:4])
                                for c, f in sorted(many.items())])


if __name__ == "__main__":
    main()
