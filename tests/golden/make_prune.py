#!/usr/bin/env python3
"""Writes the importance of the heads, the neurons and the layers of tiny models, and the logits of pruned ones.

    python tests/golden/make_prune.py            writes tests/golden/prune.safetensors
    python tests/golden/make_prune.py --check    compares with the file that is there
    python tests/golden/make_prune.py --folders DIR    compares the logits of models that tinytrain has pruned, in the
        folders DIR/NAME (TINYTRAIN_TEST_PRUNED=DIR build/test_prune 'prune_*'), with the file that is there

needs: torch, transformers 5, safetensors, numpy. The models and their batches are those of make_golden.py and
make_lm.py. PyTorch computes in float64, with a mask of ones for each head, each neuron and each layer:

    NAME.head (layers, heads), NAME.neuron (layers, neurons), NAME.layer (layers)
        the sum over batches 0 and 1 of |d loss / d mask|; heads that share a key head have one mask
    NAME.logits
        of batch 0, with masks of 0 for the less important half of each layer's heads (not in GPT-2) and
        neurons; of a language model the logits of the first 8 tokens
"""
import os
import sys

os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForImageClassification, AutoModelForSequenceClassification

import make_golden

HERE = os.path.dirname(os.path.abspath(__file__))
FILE = os.path.join(HERE, "prune.safetensors")
ENCODERS = {  # name: layers, and in each layer the linear layers that read the heads and the neurons
    "distilbert": ("distilbert.transformer.layer", "attention.out_lin", "ffn.lin2"),
    "bert": ("bert.encoder.layer", "attention.output.dense", "output.dense"),
    "minilm": ("bert.encoder.layer", "attention.output.dense", "output.dense"),
    "albert": ("albert.encoder.albert_layer_groups.0.albert_layers", "attention.dense", "ffn_output"),
    "vit": ("vit.layers", "attention.o_proj", "mlp.fc2"),
}
DECODERS = {
    "llama": ("model.layers", "self_attn.o_proj", "mlp.down_proj"),
    "qwen3": ("model.layers", "self_attn.o_proj", "mlp.down_proj"),
    "gpt2": ("transformer.h", "attn.c_proj", "mlp.c_proj"),
}


def opened(name, pruned=None):
    """Returns the model in float64, and the golden run. pruned: the folder of the model, if not that of the run."""
    lm = name in DECODERS
    folder = os.path.join(HERE, "lm" if lm else "", name)
    kind = AutoModelForCausalLM if lm else AutoModelForImageClassification if name == "vit" else AutoModelForSequenceClassification
    model = kind.from_pretrained(pruned or folder, attn_implementation="eager").double().eval()
    golden = load_file(os.path.join(folder, "golden.safetensors"))
    if name == "minilm" and not pruned:
        model.classifier.weight.data, model.classifier.bias.data = golden["classifier.weight"].double(), golden["classifier.bias"].double()
    return model, golden


def results(name, model, golden, k):
    """Returns the logits and the loss of batch k."""
    batch = {n.split(".", 1)[1]: x for n, x in golden.items() if n.startswith(f"batch{k}.")}
    if name not in DECODERS:
        logits = make_golden.logits_of(model, batch)
        return logits, torch.nn.functional.cross_entropy(logits, batch["labels"].long())
    start = batch["seq_start"].tolist()
    logits = torch.cat([model(input_ids=batch["ids"][None, a:b].long()).logits[0] for a, b in zip(start, start[1:])])
    return logits, torch.nn.functional.cross_entropy(logits, batch["targets"].long(), ignore_index=-100)


def masked(model, layers, out, down, units):
    """Adds masks to a model. Returns for each layer the masks of heads, of neurons and of the layer."""
    masks = []
    for layer in model.get_submodule(layers):
        linear = layer.get_submodule(out), layer.get_submodule(down)
        columns = [x.weight.shape[x.__class__.__name__ != "Conv1D"] for x in linear]
        mask = [torch.ones(units, dtype=torch.double), torch.ones(columns[1], dtype=torch.double), torch.ones(1, dtype=torch.double)]
        for m in mask:
            m.requires_grad_()
        each = columns[0] // units
        linear[0].register_forward_pre_hook(lambda _, x, m=mask[0], n=each: (x[0] * m.repeat_interleave(n),))
        linear[1].register_forward_pre_hook(lambda _, x, m=mask[1]: (x[0] * m,))
        for x in linear:
            x.register_forward_hook(lambda _, x, y, m=mask[2]: y * m)
        masks.append(mask)
    return masks


def half(importance):
    """Returns a mask of ones for the more important half."""
    mask = torch.zeros_like(importance)
    mask[importance.argsort(descending=True, stable=True)[:len(importance) - len(importance) // 2]] = 1
    return mask


def compare(folders):
    """Compares the logits of pruned models, as transformers loads them, with those of masked models."""
    there = load_file(FILE)
    for name in {**ENCODERS, **DECODERS}:
        model, run = opened(name, os.path.join(folders, name))
        with torch.no_grad():
            logits, _ = results(name, model, run, 0)
        error = (logits[:len(there[name + ".logits"])] - there[name + ".logits"]).abs().max().item()
        weights = sum(p.numel() for p in model.parameters()), sum(p.numel() for p in opened(name)[0].parameters())
        print(f"{name}: {weights[0]} of {weights[1]} weights in the file, logits within {error:.1e}")
        assert error <= 1e-5, name


def main():
    if "--folders" in sys.argv:
        return compare(sys.argv[sys.argv.index("--folders") + 1])
    golden = {}
    for name, (layers, out, down) in {**ENCODERS, **DECODERS}.items():
        model, run = opened(name)
        c = model.config
        units = getattr(c, "num_key_value_heads", None) or c.num_attention_heads
        masks = masked(model, layers, out, down, units)
        sums = [[torch.zeros_like(m) for m in mask] for mask in masks]
        for k in range(2):
            _, loss = results(name, model, run, k)
            flat = torch.autograd.grad(loss, [m for mask in masks for m in mask])
            for i, g in enumerate(flat):
                sums[i // 3][i % 3] += g.abs()
        for i, what in enumerate(("head", "neuron", "layer")):
            golden[f"{name}.{what}"] = torch.stack([s[i] for s in sums])
        with torch.no_grad():
            for mask, s in zip(masks, sums):
                mask[1].copy_(half(s[1]))
                if name != "gpt2":
                    mask[0].copy_(half(s[0]))
            logits, _ = results(name, model, run, 0)
        golden[f"{name}.logits"] = logits[:8] if name in DECODERS else logits
    golden = {n: x.to(torch.float32).contiguous() for n, x in golden.items()}
    if "--check" not in sys.argv:
        save_file(golden, FILE)
        os.chmod(FILE, 0o644)
        return print("wrote", FILE)
    there = load_file(FILE)
    assert there.keys() == golden.keys() and all(torch.allclose(there[n], x, rtol=1e-6, atol=1e-9) for n, x in golden.items())
    print("equal")


if __name__ == "__main__":
    main()
