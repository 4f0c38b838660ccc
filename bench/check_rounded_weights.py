#!/usr/bin/env python3
"""Compares training with weights in few bits with PyTorch's autograd and straight-through gradients.

    python bench/check_rounded_weights.py [--program build/rounded_weights] [--steps 20] [--tolerance 1e-5]

Both sides train the network of bench/rounded_weights.c with equal numbers; PyTorch computes in double precision.
Prints, as a table, the largest difference of a weight after any step, divided by the largest weight. The
status is 1 if a difference exceeds the tolerance. needs: torch 2.9."""
import argparse
import subprocess
import sys

import numpy as np
import torch

ROWS, IN_WIDTH, HIDDEN, OUT_WIDTH = 32, 24, 40, 16


def rounded(w, kind):
    """Returns w in few bits; the gradient passes straight through."""
    with torch.no_grad():
        if kind == "int8":
            step = w.abs().amax(1, keepdim=True) / 127
            y = torch.round(w / step) * step
        elif kind == "ternary":  # transformers' integrations/bitnet.py, WeightQuant
            scale = 1 / w.abs().mean().clamp(min=1e-5)
            y = (w * scale).round().clamp(-1, 1) / scale
        elif kind == "binary":
            y = torch.where(w < 0, -1.0, 1.0) * w.abs().mean(1, keepdim=True)
        else:
            y = w
    return w + (y - w).detach()


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--program", default="build/rounded_weights")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--tolerance", type=float, default=1e-5)
    a = parser.parse_args()
    random = np.random.default_rng(3)
    start = [random.normal(0, 0.2, s).astype(np.float32) for s in ((HIDDEN, IN_WIDTH), (OUT_WIDTH, HIDDEN))]
    data = [random.normal(0, 1, (ROWS, n)).astype(np.float32)
            for _ in range(a.steps) for n in (IN_WIDTH, OUT_WIDTH)]
    bad = False
    print("| weights | difference | weights moved by |\n| --- | --- | --- |")
    for kind in "none", "int8", "ternary", "binary":
        w = [torch.nn.Parameter(torch.tensor(x, dtype=torch.float64)) for x in start]
        optimizer = torch.optim.SGD(w, 0.5, momentum=0.9)
        out = subprocess.run([a.program, kind, str(a.steps)], input=b"".join(x.tobytes() for x in start + data),
                             stdout=subprocess.PIPE, check=True).stdout
        ours, at, worst = np.frombuffer(out, np.float32), 0, 0.0
        for k in range(a.steps):
            x, y = (torch.tensor(v, dtype=torch.float64) for v in data[2 * k:2 * k + 2])
            hidden = torch.nn.functional.gelu(x @ rounded(w[0], kind).T)
            loss = torch.nn.functional.mse_loss(hidden @ rounded(w[1], kind).T, y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            for p in w:
                own = ours[at:at + p.numel()].reshape(p.shape)
                at += p.numel()
                worst = max(worst, np.abs(own - p.detach().numpy()).max() / p.detach().abs().max().item())
        moved = max(np.abs(p.detach().numpy() - s).max() for p, s in zip(w, start))
        bad = bad or not worst <= a.tolerance
        print(f"| {kind} | {worst:.1e} | {moved:.2f} |")
    return bad


if __name__ == "__main__":
    sys.exit(main())
