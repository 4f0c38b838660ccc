#!/usr/bin/env python3
"""Writes golden WordPiece cases: small vocabularies, and texts with the ids that Hugging Face gives for them.

    python tests/golden/make_tokens.py

writes beside this script
    vocab_{uncased,cased}.txt    words, and pieces of one or more letters
    tokens_{uncased,cased}.tsv   texts, with these vocabularies
    points_{uncased,cased}.tsv   random strings of all kinds of characters, with point_vocabulary()
    code_points.tsv              checksums of the ids of all code points, with point_vocabulary()

needs: transformers 5, tokenizers. A line of tokens_* and points_* is `escaped text<TAB>ids separated by
spaces`, ids with [CLS] and [SEP]. The text is escaped as \\n \\t \\r \\\\ and \\uXXXX or \\UXXXXXXXX for
control and all non-ASCII characters. A line of code_points.tsv is `FIRST<TAB>cased<TAB>uncased`: checksum()
of the ids of "a", c and "b", for c from FIRST (hexadecimal) to FIRST + 0xFFF.

The reference is BertTokenizer of transformers, which uses the package `tokenizers`. See also
compare_tokens.py.
"""
import logging
import os
import random

os.environ.setdefault("HF_HUB_OFFLINE", "1")
from make_unicode import ALL, is_reordered
from tokenizers.normalizers import BertNormalizer
from tokenizers.pre_tokenizers import BertPreTokenizer
from transformers import BertTokenizer

HERE = os.path.dirname(os.path.abspath(__file__))
SPECIALS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
ASCII_PUNCT = list("!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~")
PUNCT = list("\u2013\u2014\u201c\u201d\u2018\u2019\u2026\u00bf\u00a1\u3002\uff0c\u00ab\u00bb\u00b7")
SYMBOLS = list("\u20ac\u00a9\u00b0\u2192\U0001f600\u2764\u00bd\u00b2\u2122\u24d0")
CJK = list("\u4e2d\u56fd\u4eba\u65e5\u672c\u8a9e\u5b57\u6587\u7535\u5f71\u597d\U00020000\U0002a6d6\u8c48")
KANA = list("\u30ab\u306e\u30d5\u304b\u3068")
LETTERS = [chr(c) for c in range(97, 123)]
GREEK = [chr(c) for c in range(0x3b1, 0x3ca)]
CYRILLIC = [chr(c) for c in range(0x430, 0x450)]
JAMO = [chr(c) for c in (0x1112, 0x1161, 0x11ab, 0x1100, 0x116e, 0x11a8, 0x110b, 0x1165)]
WORDS = """the a film movie was is not and of to in it this that but with for as on un good bad great love loved lov watch watched watching
act actor actors acting play played player story plot end ending ended never ever one two ten best worst year years 19 20 200 2023 99 100
don can won isn t s re ve ll d m br html w wordless happy unhappy able ness less ful ly cafe naive resume uber strasse munchen el nino
viet nam istanbul facade ele garcon angstrom deja vu coop film noir score director""".split()
PIECES = """ing ed er s ly ness less ful able un en est tion al ie ies ory ion able ur st ent 0 9 99 2 23 20 br ## fe ive sume cade"""
PIECES = [p for p in PIECES.split() if p != "##"]


def unique(*lists):
    seen = {}
    for items in lists:
        for x in items:
            seen[x] = None
    return list(seen)


def both(chars):
    return list(chars) + ["##" + c for c in chars]


def vocabularies():
    digits = [str(i) for i in range(10)]
    uncased = unique(SPECIALS, ["[unused0]", "[unused1]"], ASCII_PUNCT, PUNCT, SYMBOLS, CJK, KANA, both(digits), both(LETTERS),
                     both(["\u00df", "\u00e6", "\u00f8", "\u0131", "\u0142", "\u0111"]), both(GREEK), both(CYRILLIC), both(JAMO),
                     ["##" + c for c in KANA + SYMBOLS], WORDS, ["##" + p for p in PIECES])
    accented = list("\u00e9\u00e8\u00c9\u00f1\u00d1\u00fc\u00dc\u00f6\u00df\u0130\u0131\u00e5\u00c5\u00e7\u1ec7\u1ebf\u0410\u0430\u041f\u043f"
                    "\u03a3\u03c3\u03c2\u0391\u03ac\u0301\u0323")
    cased_words = unique(WORDS[:60], "The This A Good Bad Film I Love Caf\u00e9 caf\u00e9 na\u00efve \u00dcber Stra\u00dfe Ni\u00f1o \u00c9t\u00e9 "
                         "Paris McFly USA TV \u041c\u043e\u0441\u043a\u0432\u0430 \u0391\u03b8\u03ae\u03bd\u03b1 Vi\u1ec7t".split())
    cased = unique(SPECIALS, ASCII_PUNCT, PUNCT, SYMBOLS, CJK, KANA, both(digits), both(LETTERS), both([c.upper() for c in LETTERS]),
                   both(accented), list("\ud55c\uad6d\uc5b4"), ["##" + c for c in "\ud55c\uad6d\uc5b4"], ["##" + c for c in KANA + SYMBOLS],
                   cased_words, ["##" + p for p in PIECES[:20]])
    return {"uncased": uncased, "cased": cased}


TEXTS = [
    # an empty text, and only white space
    "", " ", "   ", "\t", "\n", "\r\n", " \t\n\r ", "\u00a0", "\u3000", "\u2028", "\u2029", "\u200b", "\ufeff", "\u0085",
    # plain words
    "the", "The film was good.", "THE FILM WAS GOOD!", "this movie is not bad", "watched watching watches watcher", "unhappy unhappiness",
    "the  film\twas\ngood\r\nand bad", "  leading and trailing  ", "a", "A", "I", "zzz", "qxz", "wordlessness ableness fulness", "McFly USA TV Paris",
    "acting actors acted actings", "stories storied story",
    # numbers, apostrophes, ASCII punctuation
    "2023 1999 200 20 2 007", "3.14 1,000 50% $5 9/10 10:30 #1", "don't can't won't isn't I've we'll he'd", "'quoted' \"double\" `tick`",
    "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~", "a+b=c a<b>c a^b a|b ~a `a` $a", "well-made, over-long; odd: yes/no?", "...", "wait...what?!", "--- *** ___",
    "snake_case_word", "e-mail@example.com", "http://www.film.com/a?b=1&c=2", "back\\slash", "c:\\film\\new", "{[(<>)]}", "1st 2nd 3rd 20s",
    "<br />", "good.<br /><br />The ending", "<br/>a<BR>b", "<html><b>film</b></html>", "&amp; &lt;br&gt;",
    # control characters
    "a\u0001b", "a\u0007 b", "\u001ba\u001f", "a\u007fb", "a\u0080b\u009fc", "a\u0085b", "a\u000bb", "a\u000cb", "a\u001cb\u001db", "a\ufffdb", "\ufffd", "\ufffd\ufffd film \ufffd",
    "a\ue000b", "a\U000f0000b", "a\U0010fffdb", "a\u00adb", "a\u200bb", "a\u200cb\u200dc", "a\ufeffb", "\ufeffthe film", "a\u2060b", "a\u202eb\u202cc", "a\U000e0041b",
    "a\u061cb", "a\u180eb", "a\u2066b",
    # white space of Unicode
    "a\u00a0b", "the\u00a0film", "a\u2003b\u2009c\u200ad", "a\u2028b\u2029c", "a\u202fb", "a\u205fb", "a\u3000b", "a\u1680b",
    # accents, composed and decomposed
    "caf\u00e9", "Caf\u00e9", "CAF\u00c9", "cafe\u0301", "CAFE\u0301", "na\u00efve", "nai\u0308ve", "\u00fcber \u00dcBER U\u0308ber", "El Ni\u00f1o", "El Nin\u0303o NI\u00d1O",
    "Vi\u1ec7t Nam", "Vie\u0323\u0302t Nam", "Vie\u0302\u0323t", "\u1ebe\u1ebf \u1ed8\u1ed9 \u01af\u01b0 \u1ee8", "\u0110\u1eb7ng", "garc\u0327on fa\u00e7ade", "\u00c5ngstr\u00f6m \u212bngstrom", "d\u00e9j\u00e0 vu", "r\u00e9sum\u00e9",
    "\u00e9l\u00e9 \u00c9t\u00e9", "x\u0301", "q\u0323\u0307w", "\u0301", "\u0301a", "a \u0301 b", "a\u0300\u0301\u0302\u0303\u0304b", "\u1e69 s\u0323\u0307 s\u0307\u0323", "\u01d6 \u01d5 \u1e9b\u0323", "M\u00fcnchen", "co\u00f6p",
    "\u0142\u00f3d\u017a \u0141\u00d3D\u0179", "\u00e6on \u00c6ON \u00f8l \u00d8L", "\u0113\u0101\u012b\u014d\u016b \u0112\u0100\u012a\u014c\u016a", "\u0161\u010d\u0159\u017e \u0160\u010c\u0158\u017d", "\u01c4 \u01c5 \u01c6 \u01cd\u01ce", "\u1d6b \u2c60 \ua722",
    # German sharp s, Turkish i
    "stra\u00dfe Stra\u00dfe STRASSE", "STRA\u1e9eE", "\u0130stanbul", "\u0130", "\u0130\u0130 I\u0307", "\u0131s\u0131 ISI", "i\u0307",
    # Greek, Cyrillic
    "\u0391\u0398\u0397\u039d\u0391", "\u0386\u0388\u0389\u038a\u038c\u038e\u038f \u03ac\u03ad\u03ae\u03af\u03cc\u03cd\u03ce", "\u03a3\u038a\u03a3\u03a5\u03a6\u039f\u03a3", "\u03c3\u03af\u03c3\u03c5\u03c6\u03bf\u03c2", "\u0391\u03b8\u03ae\u03bd\u03b1", "\u03b1\u0301 \u0390 \u03cb\u0301", "\u1f08\u1f80\u1f88\u1fb3\u1fbc\u1ffc", "\u2126 \u03a9 \u03c9",
    "\u041c\u043e\u0441\u043a\u0432\u0430 \u041c\u041e\u0421\u041a\u0412\u0410", "\u0419\u0439 \u0401\u0451 \u0418\u0306", "\u0424\u0438\u043b\u044c\u043c \u0445\u043e\u0440\u043e\u0448\u0438\u0439", "\u0407\u0457 \u0404\u0454", "\u041f\u0440\u0438\u0432\u0435\u0442!",
    # CJK, kana, Hangul
    "\u4e2d\u56fd", "\u4e2d\u56fd\u7535\u5f71good", "the\u4e2dfilm", "\u65e5\u672c\u8a9e\u306e\u5b57", "\U00020000\U0002a6d6", "a\U00020000b", "\uf900", "\u4e2d\u3002\u56fd\uff0c\u4eba", "\u3400 \u4dbf \u9fff \u4e00", "\U0002f800 \U0002a700", "\u30ab\u30d5\u30ab",
    "\u30ac \u304c \u30ab\u3099", "\u30d5\u30a3\u30eb\u30e0", "\uff26\uff29\uff2c\uff2d \uff46", "\ud55c\uad6d\uc5b4", "\ud55c \uad6d \uc5b4", "\u1112\u1161\u11ab\u1100\u116e\u11a8\u110b\u1165", "\uac00\ub098\ub2e4", "film\ud55c", "\u3131 \u314e", "\ud7a3\uac01",
    # punctuation and symbols of Unicode
    "\u201cgood\u201d \u2018bad\u2019", "it\u2019s don\u2019t", "yes\u2013no \u2014 end\u2026", "\u00bfgood? \u00a1bad!", "\u00abfilm\u00bb", "a\u00b7b a\u2022b", "5\u20ac \u00a35 \u00a5 \u00a9 \u00ae \u2122", "\u00b0 \u00b2 \u00bd \u2192", "\u00a7 \u00b6 \u2020", "a\u00b4b a\u00a8b \u00af",
    "\u3001\u3002\u300c\u300d\uff01\uff1f\uff0e", "\u05be \u061f \u0964 \u2e3a", "\u2264 \u00d7 \u00f7 \u00b1 \u2212", "\u2044 \u2010 \u2011 \u2012 \u2015", "\u02bc \u02c8 \u055a", "\ufe63 \uff0d \uff04 \uff0b", "\u24b6 \u24d0", "\u2160 \u2170 \u216f",
    # emoji
    "\U0001f600", "good\U0001f600bad", "love \u2764\ufe0f", "\U0001f468\u200d\U0001f469\u200d\U0001f467", "\U0001f44d\U0001f3fd", "\U0001f1e9\U0001f1ea", "\u263a \u2639",
    # other scripts
    "\u0645\u0631\u062d\u0628\u0627", "\u05e9\u05dc\u05d5\u05dd", "\u0928\u092e\u0938\u094d\u0924\u0947", "\u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35", "\u09cb \u0bca \u0dde", "\U00010400\U00010428", "\U0001d400", "\u13a0\uab70", "\u10a0\u1c90\u10d0",
    "the \u043a\u0438\u043d\u043e \u4e2d film\u03b1", "a\u0430\u03b1",
    # unusual valid UTF-8: noncharacters, unassigned code points, edges of the encoding's lengths
    "a\uffffb", "a\ufdd0b", "a\U0010ffffb", "a\u0378b", "\u007e\u0080\u07ff\u0800", "a\u07ffb", "a\ud7ffb", "a\U0001ffffb", "\u00c3\u00a9 \u00e2\u20ac\u2122",
    # long words: words of more than 100 characters are unknown
    "a" * 100, "a" * 101, "a" * 99 + " b", "the " + "z" * 150 + " film", "\u00e9" * 100, "e\u0301" * 100, "\u00e9" * 101, "\u4e2d" * 40, "." * 120, "ab" * 50, "ab" * 50 + "c", "\U0001f600" * 101,
    # special tokens, and near misses
    "[SEP]", "a [MASK] b", "[CLS] the film [SEP]", "[PAD]", "[UNK]", "[sep]", "[ SEP ]", "[Mask]", "[unused0]", "SEP CLS", "##ing", "a ##ed", "## #",
    # a review
    "I loved this movie!<br /><br />It wasn't the best film of 2023, but the acting -- especially the ending -- was great. 9/10",
    "\"Never\" watch it... (one of the worst films ever); Director's cut & all. \u2014 A. Caf\u00e9",
]


# The code points below POINTS are tokens of point_vocabulary(): c has the id 5 + 2 * c, and "##" with c the
# next id, so that ids tell the characters of words. White space and surrogates cannot be tokens; their ids
# are unused.
POINTS = 0x20000


def point_vocabulary():
    return {t: 5 + 2 * c + i for c in ALL if c < POINTS for i, t in enumerate((chr(c), "##" + chr(c)))} | {
        t: i for i, t in enumerate(SPECIALS)}


def bert_tokenizer(vocabulary, lowercase):
    return BertTokenizer(vocab=vocabulary, do_lower_case=lowercase)


def kinds_of_points():
    """Returns the kind ("space", "mark" ...) of each code point that is no letter, and what each code point
    becomes in lower case, without the code points that are dropped. Each result is {code point: ...}."""
    clean_up, strip, lower = (BertNormalizer(clean_text=i == 0, handle_chinese_chars=False, strip_accents=i >= 1,
                                             lowercase=i == 2) for i in range(3))
    kinds, folds = {}, {}
    words = BertPreTokenizer()
    for c in ALL:
        text = f"a{chr(c)}b"
        clean = clean_up.normalize_str(text)
        if clean in ("ab", "a b"):
            kinds[c] = "drop" if clean == "ab" else "space"
            continue
        assert clean == text
        parts = len(words.pre_tokenize_str(text))
        assert parts in (1, 3), "white space that cleaning leaves"
        fold = tuple(map(ord, lower.normalize_str(text)[1:-1]))
        if strip.normalize_str(text) == "ab":
            kinds[c] = "accent" if is_reordered(c) else "starter accent"
            continue
        folds[c] = fold
        if parts == 3:
            kinds[c] = "punctuation"
        if is_reordered(c):
            kinds[c] = "mark"
    return kinds, folds


def nasty_strings(rng, count):
    """Returns random strings of all kinds of characters, with more of the rare kinds than texts have."""
    kinds, folds = kinds_of_points()
    pools = {}
    for c, kind in kinds.items():
        pools.setdefault(kind, []).append(chr(c))
    pools["fold"] = [chr(c) for c, f in folds.items() if f != (c,) and not 0xAC00 <= c <= 0xD7A3]
    pools["fold to many"] = [chr(c) for c, f in folds.items() if len(f) > 1 and not 0xAC00 <= c <= 0xD7A3]
    pools["letter"] = [chr(c) for c in folds if c not in kinds and c < 0x20000]
    pools["latin"] = LETTERS + [c.upper() for c in LETTERS] + [str(i) for i in range(10)]
    pools["word"] = WORDS + [w.upper() for w in WORDS] + PIECES
    pools["chinese"] = [chr(c) for c in range(0x4E00, 0xA000)] + [chr(c) for c in range(0xF900, 0xFB00)]
    pools["hangul"] = [chr(c) for c in range(0xAC00, 0xD7A4)]
    pools["jamo"] = [chr(c) for c in range(0x1100, 0x1200)]
    pools["emoji"] = [chr(c) for c in range(0x1F300, 0x1F700)] + list("\u200d\ufe0f\u2764\U0001f1e9")
    pools["ascii"] = [chr(c) for c in range(128)]
    pools["special"] = SPECIALS + "[sep] [[SEP]] [SEP SEP] [MASK][PAD] [CL\u0301S] [unused0]".split()
    pools["any"] = [chr(c) for c in ALL]
    names = list(pools)
    marks = ["mark", "accent", "starter accent"]
    out = []
    for _ in range(count):
        some = rng.choices(names + marks, k=rng.randrange(1, 5)) + ["latin"]
        text = [rng.choice(pools[rng.choice(some)]) for _ in range(rng.randrange(1, 24))]
        if rng.random() < 0.2:  # adds marks of many combining classes
            text += [rng.choice(pools[rng.choice(marks)]) for _ in range(rng.randrange(2, 12))]
        if rng.random() < 0.01:  # about 100 characters, the longest word that can be known
            text += rng.choice([*LETTERS, "\u00e9", *pools["mark"]]) * rng.randrange(90, 110)
            text += [rng.choice(pools[rng.choice(marks)])]
        out.append("".join(text))
    return out


def checksum(rows):
    """Returns the FNV-1a hash, 32 bits, of all ids in rows, 4 bytes each, the lowest byte first."""
    h = 2166136261
    for ids in rows:
        for i in ids:
            for byte in i.to_bytes(4, "little"):
                h = (h ^ byte) * 16777619 & 0xFFFFFFFF
    return h


def write_points():
    berts = {kind: bert_tokenizer(point_vocabulary(), kind == "uncased") for kind in ("cased", "uncased")}
    texts = list(dict.fromkeys(nasty_strings(random.Random(1), 200)))
    for kind, bert in berts.items():
        with open(os.path.join(HERE, f"points_{kind}.tsv"), "w", encoding="ascii", newline="\n") as f:
            for text, ids in zip(texts, bert(texts)["input_ids"]):
                f.write(escape(text) + "\t" + " ".join(map(str, ids)) + "\n")
    with open(os.path.join(HERE, "code_points.tsv"), "w", encoding="ascii", newline="\n") as f:
        for first in range(0, 0x110000, 0x1000):
            block = [f"a{chr(c)}b" for c in ALL if first <= c < first + 0x1000]
            sums = [str(checksum(bert(block)["input_ids"] if block else [])) for bert in berts.values()]
            f.write(f"{first:X}\t" + "\t".join(sums) + "\n")


def escape(text):
    out = []
    for c in text:
        if c in "\n\t\r\\":
            out.append({"\n": "\\n", "\t": "\\t", "\r": "\\r", "\\": "\\\\"}[c])
        elif " " <= c <= "~":
            out.append(c)
        else:
            out.append("\\u%04x" % ord(c) if ord(c) < 0x10000 else "\\U%08x" % ord(c))
    return "".join(out)


def main():
    logging.disable(logging.WARNING)
    assert len(set(TEXTS)) == len(TEXTS), [t for t in TEXTS if TEXTS.count(t) > 1]
    for kind, vocab in vocabularies().items():
        path = os.path.join(HERE, f"vocab_{kind}.txt")
        with open(path, "w", encoding="utf-8", newline="\n") as f:
            f.write("".join(w + "\n" for w in vocab))
        bert, covered = bert_tokenizer({w: i for i, w in enumerate(vocab)}, kind == "uncased"), set()
        with open(os.path.join(HERE, f"tokens_{kind}.tsv"), "w", encoding="ascii", newline="\n") as f:
            for text in TEXTS:
                ids = bert(text)["input_ids"]
                f.write(escape(text) + "\t" + " ".join(map(str, ids)) + "\n")
                covered |= set(ids)
        print(f"{kind}: {len(vocab)} entries, {len(TEXTS)} cases, {len(covered)} entries occur")
    write_points()


if __name__ == "__main__":
    main()
