#!/usr/bin/env python3
"""Compares the optimizers with PyTorch's, and those with states of 8 bits with bitsandbytes'.

    python bench/check_optimizers.py [--program build/optimizers] [--steps 50] [--tolerance 1e-5]

Both sides update one matrix with equal random gradients. Prints, as a table, the largest difference of a
number of the matrix after any step, divided by the largest number. For states of fewer bits the table has,
instead of a test, the root mean square of the difference from the peer's updates with states of 32 bits,
divided by the root mean square of all that these updates changed. The status is 1 if a difference exceeds the
tolerance. Lion's peer is a loop of its paper's algorithm 2 in double precision. Muon's peer is
torch.optim.Muon, whose iteration is made to compute in double precision instead of bf16.

needs: torch 2.9; bitsandbytes for states of 8 bits."""
import argparse
import subprocess
import sys

import numpy as np
import torch

ROWS, COLS, LR, DECAY = 96, 130, 1e-3, 0.1


def orthogonal(grad, coefficients, steps, eps):
    """torch.optim.Muon's iteration, but in the dtype of the gradient instead of bf16."""
    a, b, c = coefficients
    x = grad.T if grad.size(0) > grad.size(1) else grad
    x = x / x.norm().clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if grad.size(0) > grad.size(1) else x


torch.optim._muon._zeropower_via_newtonschulz = orthogonal


class Lion(torch.optim.Optimizer):
    def __init__(self, params, lr, weight_decay):
        super().__init__(params, dict(lr=lr, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                m = self.state[p].setdefault("m", torch.zeros_like(p))
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.sub_(group["lr"] * torch.sign(0.9 * m + (1 - 0.9) * p.grad))
                m.mul_(0.99).add_((1 - 0.99) * p.grad)


PEERS = {
    "sgd": lambda p: torch.optim.SGD(p, LR, momentum=0.9, nesterov=True, weight_decay=DECAY),
    "adam": lambda p: torch.optim.Adam(p, LR, weight_decay=DECAY),
    "adamw": lambda p: torch.optim.AdamW(p, LR, weight_decay=DECAY),
    "lion": lambda p: Lion(p, LR, DECAY),
    "muon": lambda p: torch.optim.Muon(p, LR, weight_decay=DECAY, adjust_lr_fn="match_rms_adamw"),
    "adafactor": lambda p: torch.optim.Adafactor(p, LR, eps=(1e-30, 1e-3), weight_decay=DECAY),
}


def of_peer(make, start, gradients, dtype):
    p = torch.nn.Parameter(torch.tensor(start, dtype=dtype))
    peer, all_steps = make([p]), []
    for g in gradients:
        p.grad = torch.from_numpy(g).to(dtype)
        peer.step()
        all_steps.append(p.detach().to(torch.float64).numpy().copy())
    return np.array(all_steps)


def ours(program, kind, bits, start, gradients):
    command = [program, kind, str(bits), str(ROWS), str(COLS), str(len(gradients)), str(LR), str(DECAY)]
    numbers = start.tobytes() + b"".join(g.tobytes() for g in gradients)
    out = subprocess.run(command, input=numbers, stdout=subprocess.PIPE, check=True).stdout
    return np.frombuffer(out, np.float32).reshape(len(gradients), ROWS, COLS).astype(np.float64)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--program", default="build/optimizers")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--tolerance", type=float, default=1e-5)
    a = parser.parse_args()
    random = np.random.default_rng(5)
    start = random.normal(0, 0.05, (ROWS, COLS)).astype(np.float32)
    sizes = np.exp(random.normal(0, 1, (ROWS, COLS)))  # gradients of many sizes, about a common mean
    mean = random.normal(0, 0.5, (ROWS, COLS))
    gradients = [(1e-3 * sizes * (mean + random.normal(0, 1, (ROWS, COLS)))).astype(np.float32)
                 for _ in range(a.steps)]
    bad = False
    print("| optimizer | bits of the state | difference |\n| --- | --- | --- |")
    exact = {}
    for kind, make in PEERS.items():
        exact[kind] = of_peer(make, start, gradients, torch.float64)
        error = np.abs(ours(a.program, kind, 32, start, gradients) - exact[kind]).max() / np.abs(exact[kind]).max()
        bad = bad or not error <= a.tolerance
        print(f"| {kind} | 32 | {error:.1e} |")

    def part(x, kind):
        moved = exact[kind][-1] - start
        return np.sqrt(((x[-1] - exact[kind][-1]) ** 2).mean() / (moved ** 2).mean())

    for kind in [kind for kind in PEERS if kind != "adafactor"]:  # whose state has 32 bits
        for bits in 16, 8:
            print(f"| {kind} | {bits} | {100 * part(ours(a.program, kind, bits, start, gradients), kind):.2f}% |")
    try:
        import bitsandbytes
        peer = of_peer(lambda p: bitsandbytes.optim.AdamW8bit(p, LR, weight_decay=DECAY), start, gradients,
                       torch.float32)
        print(f"| bitsandbytes' AdamW8bit | 8 | {100 * part(peer, 'adamw'):.2f}% |")
        apart = np.sqrt(((ours(a.program, "adamw", 8, start, gradients)[-1] - peer[-1]) ** 2).mean() /
                        ((exact["adamw"][-1] - start) ** 2).mean())
        print(f"| adamw beside bitsandbytes' | 8 | {100 * apart:.2f}% |")
    except ImportError as e:
        print(f"(bitsandbytes is not there: {e})")
    return bad


if __name__ == "__main__":
    sys.exit(main())
