#!/usr/bin/env python3
"""Writes matrices and their singular value decompositions by numpy, for tests of tt_param_low_rank.

    python tests/golden/make_svd.py            writes tests/golden/svd.safetensors
    python tests/golden/make_svd.py --check    compares with the file that is there

needs: numpy, safetensors. NAME.w (out, in) float32; NAME.sigma (min(out, in)) float64, the singular values;
NAME.best (out, in) float64, the best approximation of rank (min(out, in) + 2) // 3. Matrices: tall, wide and
square ones of odd sizes; `graded`, whose singular values fall by 12 orders of magnitude; `flat`, whose singular
values are equal in pairs; `lacks`, of rank 5; and a single column.
"""
import os
import sys

import numpy as np
from safetensors.numpy import load_file, save_file

FILE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "svd.safetensors")


def orthogonal(rng, m, n):
    return np.linalg.qr(rng.standard_normal((m, n)))[0]


def main():
    rng = np.random.RandomState(1)
    w = {"tall": rng.standard_normal((37, 14)), "wide": rng.standard_normal((9, 31)), "square": rng.standard_normal((17, 17)),
         "graded": orthogonal(rng, 24, 13) * np.logspace(0, -12, 13) @ orthogonal(rng, 13, 13).T,
         "flat": orthogonal(rng, 22, 12) * np.repeat(np.arange(6, 0, -1.0), 2) @ orthogonal(rng, 12, 12).T,
         "lacks": rng.standard_normal((21, 5)) @ rng.standard_normal((5, 16)), "column": rng.standard_normal((7, 1))}
    golden = {}
    for name, x in w.items():
        x = x.astype(np.float32)
        u, s, v = np.linalg.svd(x.astype(np.float64), full_matrices=False)
        rank = (len(s) + 2) // 3
        golden.update({name + ".w": x, name + ".sigma": s, name + ".best": (u[:, :rank] * s[:rank]) @ v[:rank]})
    if "--check" not in sys.argv:
        save_file(golden, FILE)
        os.chmod(FILE, 0o644)
        return print("wrote", FILE)
    there = load_file(FILE)
    assert there.keys() == golden.keys()
    assert all(np.abs(there[n] - x).max() <= 1e-12 * np.abs(x).max() for n, x in golden.items() if not n.endswith(".w"))
    print("equal")


if __name__ == "__main__":
    main()
