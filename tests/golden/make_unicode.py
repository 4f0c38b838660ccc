#!/usr/bin/env python3
"""Writes the Unicode tables of tokenizers as C, from the effects of the package `tokenizers` on code points.

    python tests/golden/make_unicode.py     C tables to stdout, for src/text/code_points.h

needs: tokenizers (Hugging Face), the reference for what a control character, a space, punctuation or an
accent is. Each of the Rust crates from which it is built follows its own version of Unicode, so no table of
another source equals its tables. compare_tokens.py checks the tables, and the C code that reads them, against
the package.

A table is a string of numbers (see digits). The numbers form rows in the order of code points. s(x) is 2x, or
-2x - 1 if x < 0.

A code point in no row has no property:
    bert         classes of BertNormalizer, see probe(). Numbers of a row: `gap`, how many code points lie
                 between the row before and this row; `(last - first) << 2 | class`
    cjk          the code point `to` that NFD makes of each code point of the two blocks of CJK compatibility
                 ideographs. One number for each: `s(to - previous to)`
    letters      the bits of PROPERTIES. Numbers of a row: `gap`; `(last - first) << 8 | bits`
    marks        marks of a higher combining class have a higher rank, from 1. Numbers of a row: `gap`;
                 `(last - first) << 6 | rank`
    graphemes    classes, see GRAPHEMES. Numbers of a row: `gap`; `(last - first) << 4 | class`
    lower        code points that differ from their lower case, except for U+0130, which becomes two code
                 points. Numbers of a row: `distance`, the distance from the first code point of the row
                 before; `(last - first) << 3 | kind`, where `last - first` has 8 bits and `kind` is
                 `stride * 3 - 3 + step`; `s(to - previous to - distance)`. A code point c becomes
                 `to + (c - first) / stride * step`, if `stride` divides `c - first`
    compat       code points c whose NFKD is not their NFD. Numbers of a row: `18 * (distance - 1) + n - 1`
                 with `distance`, the distance from the row before, and n, the code points of the NFKD;
                 `s(first - previous first - distance)` with `first`, the first code point of the NFKD; for
                 each other code point of the NFKD its difference d from the one before, as s(d)
    pairs        canonical decompositions except those of Hangul, which are arithmetic, and of the CJK
                 blocks. Numbers of a row: `distance << 1 | composes` with `distance`, the distance from the
                 row before, and `composes`, whether NFC composes the pair; `s(first - previous first)`;
                 `s(second - previous second)`, where `second` is 0 for a single code point
"""
import importlib.metadata
import struct

from tokenizers import AddedToken, Regex, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.normalizers import NFC, NFD, NFKD, BertNormalizer, Lowercase, Precompiled, StripAccents
from tokenizers.pre_tokenizers import BertPreTokenizer, Digits, Punctuation, Split

ALL = [c for c in range(0x110000) if not 0xD800 <= c <= 0xDFFF]
CJK_BLOCKS = ((0xF900, 0xFAFF), (0x2F800, 0x2FA1F))
HANGUL = range(0xAC00, 0xD7A4)

CLEAN, CHINESE, STRIP = (
    BertNormalizer(clean_text=i == 0, handle_chinese_chars=i == 1, strip_accents=i == 2, lowercase=False)
    for i in range(3))


def nfd(*points):
    return NFD().normalize_str("".join(map(chr, points)))


def is_reordered(c):
    """Returns whether c is no starter. The text is U+0345 of the highest combining class, c, and U+0334 of
    the lowest class. NFD moves U+0334 before U+0345 only if c is no starter."""
    order = nfd(0x345, c, 0x334)
    return order.index("\u0334") < order.index("\u0345")


def probe():
    """Returns {code point: 1 if cleaning drops it, 2 if it is an accent}, the white space and the punctuation
    between words, and the Chinese characters."""
    kinds, space, punctuation, chinese = {}, set(), set(), []
    words = BertPreTokenizer()
    for c in ALL:
        text = f"a{chr(c)}b"
        clean = CLEAN.normalize_str(text)
        if clean == "ab":
            kinds[c] = 1
            continue
        if clean == "a b":
            space.add(c)
            continue
        assert clean == text
        if CHINESE.normalize_str(text) != text:
            chinese.append(c)
        parts = len(words.pre_tokenize_str(text))
        assert parts in (1, 3), "white space that cleaning leaves"
        if STRIP.normalize_str(text) == "ab":
            assert parts == 1, "an accent that is punctuation"
            kinds[c] = 2
        if parts == 3:
            punctuation.add(c)
    return kinds, space, punctuation, chinese


def mark_classes(marks):
    """Returns {mark: 0 for the lowest combining class among the marks, 1 for the next ...}."""
    below = {c: sum(nfd(c, d) != chr(c) + chr(d) for d in marks) for c in marks}
    return {c: sorted(set(below.values())).index(n) for c, n in below.items()}


def is_chinese(c):
    """Returns whether c is in a block of Chinese characters, like tt__is_cjk of the C code."""
    return (0x4E00 <= c <= 0x9FFF or 0x3400 <= c <= 0x4DBF or 0xF900 <= c <= 0xFAFF or 0x20000 <= c <= 0x2A6DF
            or 0x2A700 <= c <= 0x2B81F or 0x2B920 <= c <= 0x2CEAF or 0x2F800 <= c <= 0x2FA1F)


def run_table(one):
    """Returns [(first, last, stride, to, step)], the runs of a map {code point: resulting code point}."""
    # Greedy: from the smallest code point left, takes the longest run of any stride and step; later runs fill
    # its gaps.
    runs, left = [], dict(one)
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
    return runs


def look_back(runs):
    """Returns how many runs a search must look back. For a code point c, the search starts at the last run
    with first <= c, and the run that holds c may be an earlier run."""
    return max(i - min([j for j in range(i) if runs[j][1] > runs[i][0]] or [i]) for i in range(len(runs)))


def digits(n):
    """Returns a number in characters from # to ~, except ? and \\. The first 60 of the 90 characters end a
    number; the last 30 continue a number."""
    alphabet = [chr(c) for c in range(35, 127) if chr(c) not in "?\\"]
    text, n = alphabet[n % 60], n // 60
    while n:
        n -= 1
        text, n = alphabet[60 + n % 30] + text, n // 30
    return text


def signed(x):
    return 2 * x if x >= 0 else -2 * x - 1


def emit(name, numbers, width=110):
    """Prints an array of strings, because a C99 compiler may refuse a string of 4096 characters. Each number
    is in one string."""
    texts = [""]
    for number in map(digits, numbers):
        if len(texts[-1]) + len(number) >= 4096:
            texts.append("")
        texts[-1] += number
    room = width - 7
    lines = [[text[k:k + room] for k in range(0, len(text), room)] for text in texts]
    body = ",\n".join("\n".join(f'    "{line}"' for line in some) for some in lines)
    print(f"static const char *const tt__{name}_text[] = {{\n{body}}};" if len(texts) > 1
          else f"static const char tt__{name}_text[] =\n{body};")


def run_numbers(runs):
    before = (0, 0)
    for first, last, stride, to, step in runs:
        distance = first - before[0]
        yield from (distance, (last - first) << 3 | stride * 3 - 3 + step, signed(to - before[1] - distance))
        before = (first, to)


def cjk_numbers(blocks):
    before = 0
    for to in (x for block in blocks for x in block):
        yield signed(to - before)
        before = to


# The bits of a code point, from the lowest. "letter": \p{L} of a Split. "number": \p{N} of a Split. "space":
# \s of a Split. "punctuation": the splitter Punctuation. "word": \w, a character beside which no single-word
# added token is found. "digit": the splitter Digits. "unstable": NFC may change the code point, or moves
# marks over it. "accent": StripAccents removes the code point.
PROPERTIES = ["letter", "number", "space", "punctuation", "word", "digit", "unstable", "accent"]


def properties(rows, marks):
    text, between = "".join(map(chr, ALL)), "a" + "a".join(map(chr, ALL)) + "a"

    def matches(regex):
        pieces = Split(Regex(regex), "removed", invert=True).pre_tokenize_str(text)
        return {ord(piece) for piece, _ in pieces}

    def alone(splitter):
        return {ord(piece) for piece, _ in splitter.pre_tokenize_str(between) if len(piece) == 1} - {ord("a")}

    def added(before, **options):
        """Returns (code point, encoding) of each code point. The encoded text is `before`, the code point and
        an added token."""
        one = Tokenizer(WordLevel({"x": 0, "[UNK]": 1}, unk_token="[UNK]"))
        one.add_tokens([AddedToken("@@", normalized=False, **options)])
        return zip(ALL, one.encode_batch([before + chr(c) + "@@" for c in ALL]))

    word = {c for c, e in added("", single_word=True) if 2 not in e.ids}
    space = matches(r"\s")
    assert space == {c for c, e in added("a", lstrip=True) if e.offsets[-1][0] == 1}
    unstable = {c for c in ALL if NFC().normalize_str(chr(c)) != chr(c)} | set(marks)
    unstable |= {b for _, _, b, composes in rows if composes} | set(range(0x1161, 0x1176)) | set(
        range(0x11A8, 0x11C3))
    sets = [matches(r"\p{L}"), matches(r"\p{N}"), space, alone(Punctuation("isolated")), word,
            alone(Digits(individual_digits=True)), unstable,
            {c for c in ALL if not StripAccents().normalize_str(chr(c))}]
    assert len(sets) == len(PROPERTIES)
    return {c: bits for c in ALL if (bits := sum((c in s) << k for k, s in enumerate(sets)))}


def combining_marks():
    """Returns {mark: rank} of the marks that NFD leaves unchanged and sorts."""
    marks = [c for c in ALL if c not in HANGUL and nfd(c) == chr(c) and is_reordered(c)]
    return {c: rank + 1 for c, rank in mark_classes(marks).items()}


def pair_rows():
    """Returns (composed, first, second or 0, whether NFC composes the two) of each code point that NFD
    decomposes."""
    whole = {c: nfd(c) for c in ALL if c not in HANGUL and nfd(c) != chr(c)}
    one, rows = {d: c for c, d in reversed(whole.items())}, []
    for c, d in whole.items():
        if any(a <= c <= b for a, b in CJK_BLOCKS):
            assert len(d) == 1
        elif len(d) == 1:
            rows.append((c, ord(d), 0, False))
        else:
            first = ord(d[0]) if len(d) == 2 else one[d[:-1]]
            rows.append((c, first, ord(d[-1]), NFC().normalize_str(chr(c)) == chr(c)))
    for c, a, b, composes in rows:
        assert not composes or NFC().normalize_str(chr(a) + chr(b)) == chr(c)
    return rows


# The classes that decide where graphemes end, as far as Precompiled shows them: Precompiled replaces
# graphemes of less than 6 bytes. Hangul has no class here, because the C code has the ranges of Hangul.
# U+000D and U+000A are controls, but the C code does not break between the two.
GRAPHEMES = ["control", "extend", "extend between no consonants", "linker", "joiner", "spacing", "prepend",
             "picture", "consonant"]


def each_byte():
    """Returns a Precompiled that makes an X of each grapheme of less than 6 bytes, and of each character of a
    longer grapheme, and leaves line ends unchanged."""
    units = [256 << 10] + [0] * 767
    for byte in range(1, 256):
        if byte != 10:
            units[256 + byte] = 768 << 10 | 1 << 8 | byte
            units[512 + byte] = 1 << 31
    return Precompiled(struct.pack("<769I", 4 * len(units), *units) + b"X\0")


def grapheme_classes():
    counter, points = each_byte(), [c for c in ALL if c not in (10, 13)]
    mark, joiner, copyright, heart, ka, virama = "\u0301", "\u200d", "\u00a9", "\u2764", "\u0915", "\u094d"

    def counts(before, behind):
        """Returns the number of X in the result for each code point, written between two texts."""
        lines = []
        for k in range(0, len(points), 4096):
            text = "\n".join(before + chr(c) + behind for c in points[k:k + 4096])
            lines += counter.normalize_str(text).split("\n")
        return [len(line) for line in lines]

    def one(text):
        return len(counter.normalize_str(text))

    def joined(before, between, behind):
        """Returns the code points c for which the text of `before`, between[0], c, between[1] and `behind`
        has no grapheme break before `behind`."""
        apart = [n + one(behind) for n in counts(before + between[0], between[1])]
        return {c for c, n, m in zip(points, counts(before + between[0], between[1] + behind), apart) if n != m}

    follows = {c for c, n in zip(points, counts("a", "")) if n == 1}
    prepend = {c for c, n in zip(points, counts("", "a")) if n == 1}
    control = {c for c, n in zip(points, counts("", mark + mark)) if n == 2}
    apart = [n + one(copyright + joiner) for n in counts("", mark)]
    picture = {c for c, n, m in zip(points, counts(copyright + joiner, mark), apart) if n != m} - follows
    joins = joined(copyright, ("", ""), heart + mark) - prepend
    between_pictures = joined(copyright, ("", joiner), heart + mark) & follows
    linker = joined(ka, ("", ""), ka + mark) & follows
    between_consonants = joined(ka + virama, ("", ""), ka + mark) & follows
    consonant = joined("", ("", virama), ka + mark)
    assert joins == {0x200D} and 0x200D in between_consonants - linker
    classes = {c: 6 for c in follows}
    classes.update((c, 3) for c in between_pictures)
    classes.update((c, 2) for c in between_pictures & between_consonants)
    classes.update((c, 4) for c in linker)
    classes[0x200D] = 5
    assert between_consonants <= between_pictures | {0x200D} and linker <= between_pictures
    for n, some in ((1, control | {10, 13}), (7, prepend), (8, picture), (9, consonant)):
        assert not some & set(classes), "two classes of a code point"
        classes.update((c, n) for c in some)
    return classes


def row_numbers(table, shift):
    """Returns the number of rows, and the numbers, of {code point: bits}. A row is a run of equal bits."""
    runs = []
    for c, bits in sorted(table.items()):
        if runs and runs[-1][1:] == [c - 1, bits]:
            runs[-1][1] = c
        else:
            runs.append([c, c, bits])
    end, numbers = -1, []
    for first, last, bits in runs:
        assert bits < 1 << shift
        numbers += [first - end - 1, (last - first) << shift | bits]
        end = last
    return len(runs), numbers


def pair_numbers(rows):
    c, a, b = 0, 0, 0
    for row in rows:
        yield from ((row[0] - c) << 1 | row[3], signed(row[1] - a), signed(row[2] - b))
        c, a, b = row[:3]


def lower_runs():
    lower = {c: Lowercase().normalize_str(chr(c)) for c in ALL}
    assert [c for c, to in lower.items() if len(to) > 1] == [0x130] and lower.pop(0x130) == "i\u0307"
    return run_table({c: ord(to) for c, to in lower.items() if to != chr(c)})


def compat_rows():
    """Returns {code point: code points of the compatibility decomposition}."""
    whole = {c: NFKD().normalize_str(chr(c)) for c in ALL}
    assert all(len(to) <= 18 for to in whole.values())
    return {c: tuple(map(ord, to)) for c, to in whole.items() if to != nfd(c)}


def compat_numbers(rows):
    c, first = 0, 0
    for at, points in sorted(rows.items()):
        yield from (18 * (at - c - 1) + len(points) - 1, signed(points[0] - first - (at - c)))
        yield from (signed(b - a) for a, b in zip(points, points[1:]))
        c, first = at, points[0]


def main():
    kinds, space, punctuation, chinese = probe()
    assert chinese == [c for c in ALL if is_chinese(c)]
    bert_rows, bert = row_numbers(kinds, 2)
    blocks = [[ord(nfd(c)) for c in range(first, last + 1)] for first, last in CJK_BLOCKS]
    rows, marks = pair_rows(), combining_marks()
    bits = properties(rows, marks)
    letter_rows, letters = row_numbers(bits, len(PROPERTIES))
    assert space == {c for c, b in bits.items() if b & 4 and kinds.get(c) != 1}
    assert punctuation == {c for c, b in bits.items() if b & 8}
    mark_rows, ranks = row_numbers(marks, 6)
    grapheme_rows, graphemes = row_numbers(grapheme_classes(), 4)
    version = importlib.metadata.version("tokenizers")
    print(f"/* Written by tests/golden/make_unicode.py from the package tokenizers {version} of Python. */\n"
          f"enum {{\n    TT__LETTER_ROWS = {letter_rows}, TT__BERT_ROWS = {bert_rows}, "
          f"TT__CJK_POINTS = {sum(map(len, blocks))}, TT__MARK_ROWS = {mark_rows}, TT__PAIR_ROWS = {len(rows)},\n"
          f"    TT__COMPOSED_PAIRS = {sum(row[3] for row in rows)}\n}};")
    emit("bert", bert)
    emit("cjk", cjk_numbers(blocks))
    emit("letter", letters)
    emit("mark", ranks)
    emit("pair", pair_numbers(rows))
    print(f"enum {{ TT__GRAPHEME_ROWS = {grapheme_rows} }};")
    emit("grapheme", graphemes)
    lower, compat = lower_runs(), compat_rows()
    print(f"enum {{\n    TT__LOWER_RUNS = {len(lower)}, TT__LOWER_LOOK_BACK = {look_back(lower)}, "
          f"TT__COMPAT_ROWS = {len(compat)},\n    TT__COMPAT_POINTS = {sum(map(len, compat.values()))}\n}};")
    emit("lower", run_numbers(lower))
    emit("compat", compat_numbers(compat))


if __name__ == "__main__":
    main()
