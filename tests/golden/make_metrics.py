#!/usr/bin/env python3
"""Prints the metrics that scikit-learn, scipy, seqeval and sentence-transformers compute of small predictions, for the table `given`
of tests/trainer/predictions.h.

    python tests/golden/make_metrics.py

needs: scikit-learn, scipy, seqeval, sentence-transformers, numpy. The function `mixed` computes equal predictions
in both files.
"""
import numpy as np
import scipy.stats
import seqeval.metrics
from sentence_transformers import util
from sklearn.metrics import f1_score

NAMES = ["O", "B-a", "I-a", "B-b", "I-b", "E-a", "S-b"]


def mixed(k, salt):
    """Returns a number from 0 to 65535 that depends on both arguments alone."""
    x = (k * 2654435761 + salt * 40503 + 12345) % 2**32
    x = (x ^ (x >> 15)) * 2246822519 % 2**32
    return (x ^ (x >> 13)) >> 8 & 65535


def classes(rows, n, absent):
    """Returns labels, and predictions of which about half are surely right and the others random. If
    `absent`, no row has class n - 1."""
    there = n - absent
    labels = [mixed(k, 1) % there for k in range(rows)]
    taken = [labels[k] if mixed(k, 2) % 2 else mixed(k, 3) % there for k in range(rows)]
    return labels, taken


for rows, n, absent in (1, 2, 0), (57, 5, 0), (57, 5, 1):
    labels, taken = classes(rows, n, absent)
    print("classes", rows, n, absent, f1_score(labels, taken, average="macro"),
          f1_score(labels, taken, average="micro"), [float(x) for x in f1_score(labels, taken, average=None)])

rows, n = 41, 4
y = np.array([[mixed(k * n + c, 4) % (2 + c) == 0 and c < n - 1 for c in range(n)] for k in range(rows)]).astype(int)
z = np.array([[mixed(k * n + c, 5) % 2 == 0 if mixed(k * n + c, 6) % 3 == 0 else y[k, c] for c in range(n)]
              for k in range(rows)]).astype(int)
z[:, n - 1] = 0
print("labels", f1_score(y, z, average="macro"), f1_score(y, z, average="micro"),
      [float(x) for x in f1_score(y, z, average=None)])

rows, n = 37, 3
for ties in 0, 1:
    a = np.array([[mixed(k * n + c, 7) % (6 if ties else 65536) for c in range(n)] for k in range(rows)]) / 8
    b = a / 4 + np.array([[mixed(k * n + c, 8) % (6 if ties else 65536) for c in range(n)]
                          for k in range(rows)]) / 8 - 1000
    print("scores", ties, np.mean([scipy.stats.pearsonr(a[:, c], b[:, c])[0] for c in range(n)]),
          np.mean([scipy.stats.spearmanr(a[:, c], b[:, c])[0] for c in range(n)]))

rows, n = 41, 5
texts, pairs = (np.array([[mixed(k * n + c, salt) / 65536 - 0.3 for c in range(n)] for k in range(rows)],
                         np.float32).astype(np.float64) for salt in (13, 14))
scores = [mixed(k, 15) % 11 / 2 for k in range(rows)]
cosines = util.pairwise_cos_sim(texts, pairs).numpy()
print("pairs", scipy.stats.pearsonr(cosines, scores)[0], scipy.stats.spearmanr(cosines, scores)[0])

for seqs in 1, 40:
    truth, guess, k = [], [], 0
    for s in range(seqs):
        length = mixed(s, 9) % 12 + (seqs == 1) * 5
        truth.append([NAMES[mixed(k + i, 10) % 7] for i in range(length)])
        guess.append([t if mixed(k + i, 11) % 4 else NAMES[mixed(k + i, 12) % 7]
                      for i, t in enumerate(truth[-1])])
        k += length
    print("entities", seqs, seqeval.metrics.f1_score(truth, guess))
