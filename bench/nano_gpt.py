"""GPT-2 as one bare file of PyTorch, in the manner of nanoGPT: the strongest common baseline for a training
step of GPT-2 on one GPU. Attention is scaled_dot_product_attention, and the loss is part of the model, so
that torch.compile compiles the whole forward. There is no key-value cache, and there are no masks.
bench/pytorch.py trains the model with fused AdamW, in bf16 by autocast or with weights in bf16.

Model and initialisation: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners"; weights
normal(0, 0.02), those of the projections that end on the residual stream divided by sqrt(2 layers)."""
import math

import torch
from torch import nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention


class Block(nn.Module):
    def __init__(self, width, heads, dropout):
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x):                                   # shape of x: (batch, tokens, width)
        batch, tokens, width = x.shape
        q, k, v = (part.view(batch, tokens, self.heads, -1).transpose(1, 2)
                   for part in self.qkv(self.norm1(x)).split(width, dim=2))
        mixed = scaled_dot_product_attention(q, k, v, dropout_p=self.dropout if self.training else 0.0,
                                             is_causal=True)
        x = x + self.drop(self.project(mixed.transpose(1, 2).reshape(batch, tokens, width)))
        return x + self.drop(self.down(gelu(self.up(self.norm2(x)), approximate="tanh")))


class NanoGPT(nn.Module):
    """A GPT-2. vocabulary is 50,257, or 50,304: a multiple of 64 suits tensor cores, and no token uses the
    rows beyond 50,257."""

    def __init__(self, vocabulary=50304, layers=12, width=768, heads=12, positions=1024, dropout=0.0):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(positions, width)
        self.drop, self.norm = nn.Dropout(dropout), nn.LayerNorm(width)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.head = nn.Linear(width, vocabulary, bias=False)
        for name, p in self.named_parameters():
            if p.ndim >= 2:
                last = name.endswith(("project.weight", "down.weight"))
                nn.init.normal_(p, 0.0, 0.02 / math.sqrt(2 * layers) if last else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(p)
        self.head.weight = self.tokens.weight

    def forward(self, ids, targets):
        """Returns the mean loss over the targets that are not -100. ids, targets: (batch, tokens)."""
        x = self.drop(self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device)))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)
