#!/usr/bin/env python3
"""Trains transformers' BertForMaskedLM on the masked batches that build/masked_losses wrote, from the same folder
and with the same settings, and compares the losses. See bench/masked_losses.c.

needs: torch, transformers

    python bench/masked_losses.py start/ masked.jsonl
"""
import json
import os
import sys

os.environ.setdefault("HF_HUB_OFFLINE", "1")
import torch
from transformers import BertForMaskedLM

LR, CLIP = 5e-4, 1.0


def padded(batch):
    """Returns input_ids, attention_mask and labels (-100: not masked) of a batch."""
    start, ids = batch["start"], batch["ids"]
    n, longest = len(start) - 1, max(b - a for a, b in zip(start, start[1:]))
    labels = torch.full((len(ids),), -100)
    labels[torch.tensor(batch["masked"])] = torch.tensor(batch["targets"])
    out = dict(input_ids=torch.zeros(n, longest, dtype=torch.long), labels=torch.full((n, longest), -100),
               attention_mask=torch.zeros(n, longest, dtype=torch.long))
    for s, (a, b) in enumerate(zip(start, start[1:])):
        out["input_ids"][s, :b - a] = torch.tensor(ids[a:b])
        out["labels"][s, :b - a] = labels[a:b]
        out["attention_mask"][s, :b - a] = 1
    return out


def main():
    folder, path = sys.argv[1:3]
    with open(path) as file:
        batches = [json.loads(line) for line in file]
    model = BertForMaskedLM.from_pretrained(folder, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    model.train()
    named = list(model.named_parameters())
    plain = [p for n, p in named if n.endswith("bias") or "LayerNorm" in n]
    decayed = [p for n, p in named if not (n.endswith("bias") or "LayerNorm" in n)]
    optimizer = torch.optim.AdamW([{"params": decayed, "weight_decay": 0.01}, {"params": plain, "weight_decay": 0.0}],
                                  lr=LR, betas=(0.9, 0.999), eps=1e-8)
    steps, warmup, worst = len(batches), len(batches) // 10, 0.0
    for step, batch in enumerate(batches):
        for group in optimizer.param_groups:
            group["lr"] = LR * (step / warmup if step < warmup else (steps - step) / (steps - warmup))
        loss = model(**padded(batch)).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        worst = max(worst, abs(loss.item() - batch["loss"]) / loss.item())
        if step % 20 == 0 or step == steps - 1:
            print(f"step {step}: PyTorch {loss.item():.6f}, tinytrain {batch['loss']:.6f}", flush=True)
    print(f"largest difference of {steps} losses: {100 * worst:.4f}%")


if __name__ == "__main__":
    main()
