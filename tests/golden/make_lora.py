#!/usr/bin/env python3
"""Writes golden LoRA adapters of the tiny language models of make_lm.py, made by Hugging Face peft.

    python tests/golden/make_lora.py                  writes tests/golden/lm/NAME/lora/
    python tests/golden/make_lora.py --load NAME DIR  loads a peft folder into model NAME and prints how far
                                                      the logits of batch 0 are from DIR/logits.safetensors

needs: torch, transformers 5, peft, safetensors, numpy. Each folder gets adapter_config.json and
adapter_model.safetensors as peft saves them, with random A and B, and golden.safetensors (float32):

    logits (tokens, vocab)   of batch 0 of ../golden.safetensors, computed in float64
    grad.NAME                gradients of the mean loss of that batch, with the names and shapes of the
                             adapter
"""

import argparse
import os
import shutil
import sys
import tempfile

import numpy as np
import torch
from make_lm import HERE, logits_of, stored
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

ADAPTERS = {
    "gpt2": dict(r=3, lora_alpha=5, target_modules=["c_attn", "c_fc", "attn.c_proj"], fan_in_fan_out=True),
    "llama": dict(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "gate_proj", "down_proj"]),
    "neox": dict(r=2, lora_alpha=3, target_modules=["query_key_value", "dense_4h_to_h"]),
    "falcon_groups": dict(r=5, lora_alpha=5, target_modules=["query_key_value"]),
}


def batch_of(name):
    golden = load_file(os.path.join(HERE, name, "golden.safetensors"))
    return {k: golden[f"batch0.{k}"] for k in ("ids", "seq_start", "targets")}


def run(name, rng):
    folder = os.path.join(HERE, name, "lora")
    base = AutoModelForCausalLM.from_pretrained(os.path.join(HERE, name))
    # else the adapter's config would hold a path of this machine
    base.config._name_or_path = base.name_or_path = None
    model = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", lora_dropout=0.0, **ADAPTERS[name]))
    named = {n: p for n, p in sorted(model.named_parameters()) if "lora_" in n}
    for p in named.values():
        p.data = torch.from_numpy((0.3 * rng.standard_normal(tuple(p.shape))).astype(np.float32))
    with tempfile.TemporaryDirectory() as made:
        model.save_pretrained(made)
        os.makedirs(folder, exist_ok=True)
        for file in "adapter_config.json", "adapter_model.safetensors":
            shutil.copy(os.path.join(made, file), os.path.join(folder, file))
    batch = batch_of(name)
    model.double().train()
    logits = logits_of(model, batch)
    torch.nn.functional.cross_entropy(logits, batch["targets"].long()).backward()
    golden = {"logits": stored(logits)}
    golden.update({"grad." + n.replace(".default", ""): stored(p.grad) for n, p in named.items()})
    save_file(golden, os.path.join(folder, "golden.safetensors"))
    for file in os.listdir(folder):
        os.chmod(os.path.join(folder, file), 0o644)
    return f"{name}: {len(named)} tensors"


def load(name, folder):
    base = AutoModelForCausalLM.from_pretrained(os.path.join(HERE, name))
    model = PeftModel.from_pretrained(base, folder).double().eval()
    ours = load_file(os.path.join(folder, "logits.safetensors"))["logits"]
    with torch.no_grad():
        logits = logits_of(model, batch_of(name))
    print(f"{name}: largest difference of logits {(logits - ours.double()).abs().max().item():.2e}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--load", nargs=2, metavar=("NAME", "DIR"), help="compare a folder's logits")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.load:
        return load(*args.load)
    for k, name in enumerate(ADAPTERS):
        print(run(name, np.random.RandomState(k)))


if __name__ == "__main__":
    sys.exit(main())
