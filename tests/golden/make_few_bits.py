#!/usr/bin/env python3
"""Writes few_bits.safetensors: a matrix in the formats of tt_param_store, as bitsandbytes 0.50.2 (int8, NF4
with double quantisation) and gguf 0.19 (q4_0) make them. tests/ops/stored.h computes the same matrix x. Needs
bitsandbytes, gguf, numpy, safetensors and torch."""
import numpy as np
import os

import bitsandbytes.functional as F
import gguf
import torch
from safetensors.numpy import save_file

ROWS, COLS = 160, 128


def matrix():
    """Returns sums of three random numbers of 9 bits, whose rows have different scales. f16 holds them."""
    x = np.empty(ROWS * COLS, dtype=np.float64)
    u = 1
    for k in range(ROWS * COLS):
        total = 0
        for _ in range(3):
            u = (u * 1664525 + 1013904223) % 2 ** 32
            total += u >> 23
        x[k] = (total - 766) * 2.0 ** -(8 + k // COLS % 5)
    return x.reshape(ROWS, COLS).astype(np.float32)


def main():
    x = matrix()
    assert (x.astype(np.float16).astype(np.float32) == x).all()
    t = torch.from_numpy(x)
    codes, state = F.quantize_4bit(t, blocksize=64, compress_statistics=True, quant_type="nf4")
    wide = F.dequantize_4bit(codes, state)
    cb, scb, _ = torch.ops.bitsandbytes.int8_vectorwise_quant.default(t.half(), 0.0)
    q4 = gguf.quants.quantize(x, gguf.GGMLQuantizationType.Q4_0)
    out = {
        "int8": cb.numpy(), "int8.scales": scb.float().numpy(),
        "nf4": codes.numpy().reshape(-1), "nf4.scales": state.absmax.numpy(),
        "nf4.nested": state.state2.absmax.numpy(), "nf4.offset": state.offset.reshape(1).float().numpy(),
        "nf4.map": state.state2.code.numpy(), "nf4.numbers": state.code.numpy(), "nf4.wide": wide.numpy(),
        "q4_0": q4.reshape(-1), "q4_0.wide": gguf.quants.dequantize(q4, gguf.GGMLQuantizationType.Q4_0),
    }
    out = {name: np.ascontiguousarray(value) for name, value in out.items()}
    save_file(out, os.path.join(os.path.dirname(os.path.abspath(__file__)), "few_bits.safetensors"))


if __name__ == "__main__":
    main()
