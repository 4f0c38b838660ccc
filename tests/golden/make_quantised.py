#!/usr/bin/env python3
"""Writes golden language models whose weights bitsandbytes has quantised, as transformers saves them.

    python tests/golden/make_quantised.py            writes tests/golden/quantised/NAME/
    python tests/golden/make_quantised.py --check    writes to a temporary folder and compares byte for byte

needs: torch, transformers 5, bitsandbytes, safetensors, numpy. Each folder gets config.json and
model.safetensors, and golden.safetensors, the reference:

    ids (tokens)             one sequence, int32
    logits (tokens, vocab)   computed in float64 from the widened weights, float32
    widened (n)              every 29th value of the module of WIDENED, in tinytrain's order of rows, float32

The models of 8 bits are also computed from widened weights, because bitsandbytes rounds activations to 8 bits
as well.
"""

import argparse
import filecmp
import os
import sys
import tempfile

os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import bitsandbytes as bnb
import numpy as np
import torch
from make_lm import as_here, initialise, stored
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig

HERE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "quantised")
FOUR = dict(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.float32)
LLAMA = dict(model_type="llama", vocab_size=41, hidden_size=64, num_attention_heads=4, num_key_value_heads=2,
             num_hidden_layers=2, intermediate_size=320, max_position_embeddings=64,
             tie_word_embeddings=False)
GPT2 = dict(model_type="gpt2", vocab_size=37, n_embd=64, n_head=2, n_layer=1, n_inner=128, n_positions=32,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)


def neox(hidden):
    return dict(model_type="gpt_neox", vocab_size=12, hidden_size=hidden, num_attention_heads=2,
                num_hidden_layers=1, intermediate_size=64, max_position_embeddings=32,
                tie_word_embeddings=False, hidden_dropout=0.0, attention_dropout=0.0)


MODELS = {
    "llama_nf4": (LLAMA, FOUR),
    "llama_int8": (LLAMA, dict(load_in_8bit=True)),
    "llama_fp4": (dict(LLAMA, num_hidden_layers=1), dict(FOUR, bnb_4bit_quant_type="fp4")),
    "llama_single": (dict(LLAMA, num_hidden_layers=1), dict(FOUR, bnb_4bit_use_double_quant=False)),
    "gpt2_nf4": (GPT2, FOUR),
    "gpt2_int8": (GPT2, dict(load_in_8bit=True)),
    # heads whose rows have whole nested blocks of scales, and heads that share nested blocks
    "neox_nf4": (neox(256), FOUR),
    "neox_mixed": (neox(64), FOUR),
    "neox_int8": (neox(64), dict(load_in_8bit=True)),
}
WIDENED = {"llama": "model.layers.0.mlp.down_proj", "gpt2": "transformer.h.0.attn.c_attn",
           "gpt_neox": "gpt_neox.layers.0.attention.query_key_value"}


def values_of(module):
    """Returns the values of a quantised layer's weight, (out, in)."""
    w = module.weight
    if isinstance(module, bnb.nn.Linear4bit):
        return bnb.functional.dequantize_4bit(w.data, w.quant_state)
    return (w.data if w.CB is None else w.CB).float() * (w.SCB / 127)[:, None]


def run(name, folder):
    os.makedirs(folder, exist_ok=True)
    rng = np.random.RandomState(300 + list(MODELS).index(name))
    settings, how = dict(MODELS[name][0]), MODELS[name][1]
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        setattr(config, key, None)
    model = AutoModelForCausalLM.from_config(config)
    initialise(model, rng)
    with tempfile.TemporaryDirectory() as plain:
        model.save_pretrained(plain)
        few = AutoModelForCausalLM.from_pretrained(plain, quantization_config=BitsAndBytesConfig(**how),
                                                   dtype=torch.float32, device_map="cpu")
    few.save_pretrained(folder)
    for file in set(os.listdir(folder)) - {"config.json", "model.safetensors", "golden.safetensors"}:
        os.remove(os.path.join(folder, file))
    ids = rng.randint(0, config.vocab_size, 21)
    golden = {"ids": torch.from_numpy(ids.astype(np.int32))}
    layers = {n: m for n, m in few.named_modules() if isinstance(m, (bnb.nn.Linear4bit, bnb.nn.Linear8bitLt))}
    for n, m in layers.items():
        x = values_of(m)
        model.get_submodule(n).weight.data = x.t().contiguous() if config.model_type == "gpt2" else x
        if n == WIDENED[config.model_type]:
            x = x if config.model_type == "gpt2" else as_here(n + ".weight", x, config)
            golden["widened"] = stored(x.flatten()[::29])
    tokens = torch.from_numpy(ids)[None]
    quantised = few(input_ids=tokens).logits if "int8" not in name else None
    logits = model.double().eval()(input_ids=tokens).logits[0]
    if quantised is not None:
        assert (quantised[0] - logits).abs().max() < 2e-5, (quantised[0] - logits).abs().max()
    golden["logits"] = stored(logits)
    save_file(golden, os.path.join(folder, "golden.safetensors"))
    for file in os.listdir(folder):
        os.chmod(os.path.join(folder, file), 0o644)
    return f"{name}: {len(layers)} quantised layers"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare with the committed files")
    parser.add_argument("names", nargs="*", help="models to make (all)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    root = tempfile.mkdtemp() if args.check else HERE
    bad = []
    for name in args.names or MODELS:
        print(run(name, os.path.join(root, name)))
        if args.check:
            bad += filecmp.cmpfiles(os.path.join(root, name), os.path.join(HERE, name),
                                    os.listdir(os.path.join(HERE, name)), shallow=False)[1]
    if bad:
        sys.exit("differs from the committed files: " + ", ".join(bad))


if __name__ == "__main__":
    main()
