#!/usr/bin/env python3
"""Learns the WordPiece vocabulary of the review data: reviews.tsv (train rows only) -> vocab.txt.

    python3 examples/data/make_vocab.py [--size 3000] [--reviews FILE] [--out FILE]

Needs only the standard library; the same input gives the same file. The vocabulary has, in this order:
    [PAD] [UNK] [CLS] [SEP] [MASK]
    every printable ASCII character that lower-casing leaves, and ##letters and ##digits, so that no ASCII text needs [UNK];
    other characters seen
    the words that occur at least twice, most frequent first
    word pieces, in the order of byte-pair merging, which begins with single characters and joins the most frequent pair of
    neighbours, again and again. Each distinct word counts once, because frequent words are entries already. The pieces are
    therefore parts of many words: endings such as ##ing and ##ly, and common stems.
"""
import argparse
import collections
import heapq
import os
import string
import unicodedata

HERE = os.path.dirname(os.path.abspath(__file__))
SPECIALS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def basic_tokens(text):
    """Returns the words of a text as BERT's uncased basic tokenizer does: without control characters and accents, in lower
    case, split at space and punctuation."""
    words, word = [], ""
    for c in text:
        kind = unicodedata.category(c)
        if c not in "\t\n\r" and (kind in ("Cc", "Cf", "Co", "Cs") or c == "\ufffd"):
            continue
        ideograph = unicodedata.name(c, "").startswith("CJK ") and kind == "Lo"
        for x in "".join(y.lower() for y in unicodedata.normalize("NFD", c) if unicodedata.category(y) != "Mn"):
            alone = ideograph or x in string.punctuation or unicodedata.category(x).startswith("P")
            if alone or x.isspace():
                words += [word] if word else []
                words += [x] if alone else []
                word = ""
            else:
                word += x
    return words + ([word] if word else [])


def pieces_by_merging(words, least=3):
    """Yields pieces until no pair occurs in `least` places. "##" marks a piece that continues a word."""
    splits = [[w[0]] + ["##" + c for c in w[1:]] for w in sorted(words)]
    where, count = collections.defaultdict(set), collections.Counter()
    for i, s in enumerate(splits):
        for pair in zip(s, s[1:]):
            count[pair] += 1
            where[pair].add(i)
    heap = [(-n, pair) for pair, n in count.items()]
    heapq.heapify(heap)
    while heap:
        n, pair = heapq.heappop(heap)
        if -n != count[pair]:
            if count[pair]:
                heapq.heappush(heap, (-count[pair], pair))
            continue
        if -n < least:
            return
        joined = pair[0] + pair[1][2:]
        yield joined
        touched = set()
        for i in sorted(where[pair]):
            s, out, k = splits[i], [], 0
            for p in zip(s, s[1:]):
                count[p] -= 1
                touched.add(p)
            while k < len(s):
                if k + 1 < len(s) and (s[k], s[k + 1]) == pair:
                    out.append(joined)
                    k += 2
                else:
                    out.append(s[k])
                    k += 1
            splits[i] = out
            for p in zip(out, out[1:]):
                count[p] += 1
                where[p].add(i)
                touched.add(p)
        for p in sorted(touched):
            if count[p] > 0 and p != pair:
                heapq.heappush(heap, (-count[p], p))


def word_pieces(word, vocab):
    """Returns the pieces of a word, each the longest that fits, or None if the vocabulary cannot spell the word."""
    out, start = [], 0
    while start < len(word):
        for end in range(len(word), start, -1):
            piece = ("##" if start else "") + word[start:end]
            if piece in vocab:
                break
        else:
            return None
        out.append(piece)
        start = end
    return out


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=int, default=3000, help="no more entries than this (default %(default)s)")
    parser.add_argument("--reviews", default=os.path.join(HERE, "reviews.tsv"))
    parser.add_argument("--out", default=os.path.join(HERE, "vocab.txt"))
    args = parser.parse_args()

    rows = []
    with open(args.reviews, encoding="utf-8", newline="\n") as f:
        if next(f).rstrip("\r\n").split("\t") != ["text", "label", "split"]:
            raise SystemExit(f"{args.reviews}: the first line must be text<TAB>label<TAB>split")
        for number, line in enumerate(f, 2):
            cells = line.rstrip("\r\n").split("\t")
            if len(cells) != 3:
                raise SystemExit(f"{args.reviews}:{number}: {len(cells)} columns, expected 3")
            rows.append((basic_tokens(cells[0]), cells[2]))
    words = collections.Counter(w for tokens, split in rows if split == "train" for w in tokens)

    base = string.ascii_lowercase + string.digits
    vocab = dict.fromkeys(SPECIALS + list(string.punctuation) + list(base) + ["##" + c for c in base])
    seen = sorted({c for w in words for c in w if not c.isascii()})
    vocab.update(dict.fromkeys(seen + ["##" + c for c in seen]))
    whole = [w for w, n in sorted(words.items(), key=lambda x: (-x[1], x[0])) if n >= 2]
    wanted = [w for w in whole if w not in vocab]
    vocab.update(dict.fromkeys(wanted[:max(0, args.size - len(vocab))]))
    for piece in pieces_by_merging([w for w in words if len(w) > 1]):
        if len(vocab) >= args.size:
            break
        vocab.setdefault(piece)

    with open(args.out, "w", encoding="utf-8", newline="\n") as f:
        f.write("".join(v + "\n" for v in vocab))
    for split in ("train", "test"):
        chosen = [tokens for tokens, s in rows if s == split]
        cut = [[word_pieces(w, vocab) for w in tokens] for tokens in chosen]
        lengths = [sum(len(p or [0]) for p in review) + 2 for review in cut]
        whole_words = sum(len(p or []) == 1 for review in cut for p in review) / max(1, sum(map(len, cut)))
        unknown = sum(p is None for review in cut for p in review)
        if chosen:
            print(f"{split}: {len(chosen)} reviews, {sum(lengths) / len(lengths):.1f} tokens on average, {max(lengths)} at most "
                  f"(with [CLS] and [SEP]); {100 * whole_words:.1f}% of words are one token, {unknown} unknown")
    print(f"{len(vocab)} entries of at most {args.size}: {len(wanted)} words seen twice or more, of {len(words)} distinct")


if __name__ == "__main__":
    main()
