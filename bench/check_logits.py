#!/usr/bin/env python3
"""Compares the logits of random checkpoints of every architecture with those of transformers and of a float64
run.

    python bench/check_logits.py [--lora] [--only NAME] [--program build/logits] [--tolerance 1e-5]

Prints a table of the largest differences over all logits of some sequences: between tinytrain and
transformers in fp32, and of each from the same model computed in float64. The models are the tiny models of
the golden tests; the same models with a width of 256 and 4 layers; and some tiny models whose config asks for
the rotation of half of each head's columns, which transformers does for GPT-NeoX alone. With --lora, peft
saves a random adapter of each model, tinytrain reads the adapter and saves a copy, and peft loads the copy.
The status is 1 if one of tinytrain's differences exceeds the tolerance. Wide models do not count, because
their sums have larger rounding errors in both programs.

needs: torch, transformers, peft for --lora."""
import argparse
import contextlib
import os
import subprocess
import sys
import tempfile

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "tests", "golden"))
import make_golden
import make_lm
import numpy as np
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

CLASSIFIERS = ("distilbert", "bert", "roberta", "big_bird", "big_bird_full", "xlm_roberta", "camembert",
               "albert")
WIDER = {
    "gpt2": dict(n_embd=256, n_head=8, n_layer=4, n_inner=1024),
    "bert": dict(hidden_size=256, num_attention_heads=8, num_hidden_layers=4, intermediate_size=1024),
    "distilbert": dict(dim=256, n_heads=8, n_layers=4, hidden_dim=1024),
    "llama": dict(hidden_size=256, num_attention_heads=8, num_hidden_layers=4, intermediate_size=688),
}
TARGETS = {
    "gpt2": dict(target_modules=["c_attn", "c_fc", "attn.c_proj"], fan_in_fan_out=True),
    "llama": dict(target_modules=["q_proj", "v_proj", "gate_proj", "down_proj"]),
}


@contextlib.contextmanager
def float64():
    """Makes transformers' models use float64 even where they always compute in float32."""
    kept = torch.float32
    torch.float = torch.float32 = torch.float64
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.float = torch.float32 = kept
        torch.set_default_dtype(kept)


def configs():
    """Yields (name, config) of each model: tiny, wider, and with half of the columns rotated."""
    for wide in False, True:
        for name, settings in make_lm.MODELS.items():
            settings = dict(settings)
            kind = settings.pop("model_type")
            if wide:
                settings.update(WIDER["gpt2" if kind == "gpt2" else "llama"])
                settings.pop("head_dim", None)
                if kind == "falcon":
                    settings["ffn_hidden_size"] = settings.pop("intermediate_size")
                for key in "num_key_value_heads", "num_kv_heads":
                    settings.update({key: 4} if key in settings else {})
            yield name + ", wide" * wide, AutoConfig.for_model(kind, **settings)
        for name in CLASSIFIERS:
            config = make_golden.shapes()[name][1]
            for key, value in WIDER["distilbert" if name == "distilbert" else "bert"].items() if wide else ():
                setattr(config, key, value)
            yield name + ", wide" * wide, config
    half = dict(rope_type="default", rope_theta=10000.0, partial_rotary_factor=0.5)
    for name in "llama", "mistral", "qwen2", "qwen3", "neox", "falcon":
        settings = {**make_lm.MODELS[name], "rope_parameters": half}
        yield name + ", half", AutoConfig.for_model(settings.pop("model_type"), **settings)


def sequences(rng, config):
    longest = getattr(config, "max_position_embeddings", 32)
    longest, first = min(64, longest - 2 * (config.model_type in make_golden.OFFSET)), 2
    lengths = [1, longest, longest - 3] + [int(rng.randint(2, longest)) for _ in range(3)]
    return [rng.randint(first, config.vocab_size, n) for n in lengths]


@torch.no_grad()
def theirs(model, ids):
    """Returns the logits of all sequences, in float64. A short sequence switches BigBird to full attention
    until the attention type is set again."""
    rows = []
    for seq in ids:
        if model.config.model_type == "big_bird":
            model.bert.set_attention_type(model.config.attention_type)
        rows.append(model(input_ids=torch.from_numpy(seq)[None]).logits.double().flatten())
    return torch.cat(rows).numpy()


def ours(program, folder, ids, *adapter):
    text = "".join(" ".join(map(str, seq)) + "\n" for seq in ids)
    out = subprocess.run([program, "--ids", folder, *adapter], input=text, stdout=subprocess.PIPE, text=True,
                         check=True).stdout
    return np.array([float(x) for x in out.split()])


def adapted(config, model, folder, rng):
    """Gives the model a random adapter and saves the adapter."""
    from peft import LoraConfig, get_peft_model
    gated = config.model_type in ("llama", "mistral", "qwen2", "qwen3", "gemma3_text")
    targets = TARGETS.get("llama" if gated else config.model_type, dict(target_modules=["query_key_value"]))
    model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=8, **targets))
    for name, p in sorted(model.named_parameters()):
        if "lora_" in name:
            p.data = torch.from_numpy((0.1 * rng.standard_normal(tuple(p.shape))).astype(np.float32))
    model.save_pretrained(folder)


def compare(name, config, a, rng):
    """Returns (largest logit, difference of tinytrain from transformers, of tinytrain from float64, of
    transformers from float64)."""
    auto = AutoModelForSequenceClassification if name.split(",")[0] in CLASSIFIERS else AutoModelForCausalLM
    config._attn_implementation = "eager" if config.model_type == "big_bird" else "sdpa"
    model = auto.from_config(config)
    (make_golden if auto is AutoModelForSequenceClassification else make_lm).initialise(model, rng)
    if "wide" in name:  # makes the logits about as large as those of tiny models
        for p in model.parameters():
            p.data *= 0.3 if p.dim() > 1 else 1
    ids = sequences(rng, config)
    with tempfile.TemporaryDirectory() as folder:
        base, first, copy = (os.path.join(folder, x) for x in ("base", "first", "copy"))
        model.eval().save_pretrained(base)
        with float64():
            double = auto.from_config(config)
            double.load_state_dict({k: v.double() for k, v in model.state_dict().items()})
            double.eval()
        if a.lora:
            from peft import PeftModel
            adapted(config, model, first, rng)
            x = ours(a.program, base, ids, first, copy)
            model = PeftModel.from_pretrained(auto.from_pretrained(base, dtype=torch.float32), copy).eval()
            double = PeftModel.from_pretrained(double, copy).double().eval()
        else:
            x = ours(a.program, base, ids)
        y = theirs(model, ids)
        with float64():
            z = theirs(double, ids)
    if not len(x) == len(y) == len(z):
        sys.exit(f"{name}: {len(x)} logits of tinytrain, {len(y)} of transformers")
    return np.abs(z).max(), np.abs(x - y).max(), np.abs(x - z).max(), np.abs(y - z).max()


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--lora", action="store_true")
    p.add_argument("--only")
    p.add_argument("--program", default="build/logits")
    p.add_argument("--tolerance", type=float, default=1e-5)
    a = p.parse_args()
    if not os.access(a.program, os.X_OK):
        sys.exit(f"--program {a.program}: there is no such program; `make build/logits` builds one")
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    bad, compared = [], 0
    print("| random checkpoint | largest logit | tinytrain - transformers | tinytrain - float64 "
          "| transformers - float64 |\n| --- | --- | --- | --- | --- |")
    for k, (name, config) in enumerate(configs()):
        if (a.only and a.only not in name) or (a.lora and name.split(",")[0] in CLASSIFIERS):
            continue
        compared += 1
        largest, *differences = compare(name, config, a, np.random.RandomState(k))
        print(f"| {name} | {largest:.2g} | " + " | ".join(f"{x:.1e}" for x in differences) + " |", flush=True)
        if "wide" not in name and not max(differences[:2]) <= a.tolerance:
            bad.append(name)
    if not compared:
        sys.exit(f"--only {a.only}: no model is of this name")
    if bad:
        sys.exit("differs by more: " + ", ".join(bad))


if __name__ == "__main__":
    main()
