#!/usr/bin/env python3
"""Writes golden training runs of tiny language models, computed by PyTorch and Hugging Face transformers.

    python tests/golden/make_lm.py            writes tests/golden/lm/NAME/
    python tests/golden/make_lm.py --check    writes to a temporary folder and compares byte for byte

needs: torch, transformers 5, safetensors, numpy. Each folder gets config.json and model.safetensors, the
starting checkpoint as transformers saves it, and golden.safetensors, the reference (float32 or int32):

    batchB.ids (tokens)             B = 0..4; all sequences one after another, no padding
    batchB.seq_start (n_seqs + 1)   sequence s is tokens seq_start[s] .. seq_start[s + 1] - 1
    batchB.targets (tokens)         the next token; -100 at the end of a sequence, and in some other places
    logits (tokens, vocab), loss (1)   of batch 0 with the starting weights
    grad.NAME, step5.NAME              gradient of that loss; parameter after 5 steps, on batches 0..4
    losses (5), grad_norms (5)         of those steps; the norm is over all parameters, before clipping
    greedy.prompt, greedy.ids          a prompt, and the ids that generate() adds to it without sampling
    long.ids (300), long.logits (8, vocab)   of falcon_alibi_heads: a sequence, and logits of its last 8 rows

Gradients and parameters have tinytrain's layout: (out, in), and rows of fused query_key_value in the order
all queries, all keys, all values. The reference runs in float64, except for what transformers computes in
float32 whatever the model's dtype (RMSNorm, rotary angles). Optimizer as in make_golden.py: AdamW, lr 1e-3,
weight decay 0.01 of matrices, gradients clipped to a norm of 1.
"""

import argparse
import filecmp
import json
import os
import sys
import tempfile

os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

HERE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "lm")
STEPS = 5

NO_DROPOUT = dict(hidden_dropout=0.0, attention_dropout=0.0)
MODELS = {
    "gpt2": dict(
        model_type="gpt2",
        vocab_size=37,
        n_embd=24,
        n_head=3,
        n_layer=2,
        n_inner=28,
        n_positions=19,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    ),
    # grouped heads whose size is not hidden_size / heads, untied weights, Llama 3.1's scaling
    "llama": dict(
        model_type="llama",
        vocab_size=41,
        hidden_size=20,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=6,
        num_hidden_layers=2,
        intermediate_size=27,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        rope_parameters=dict(
            rope_type="llama3",
            rope_theta=500.0,
            factor=4.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=16,
        ),
    ),
    "llama_biases": dict(
        model_type="llama",
        vocab_size=31,
        hidden_size=18,
        num_attention_heads=1,
        num_hidden_layers=2,
        intermediate_size=21,
        max_position_embeddings=32,
        tie_word_embeddings=True,
        attention_bias=True,
        mlp_bias=True,
        rope_parameters=dict(rope_type="linear", rope_theta=10000.0, factor=2.0),
    ),
    "mistral": dict(
        model_type="mistral",
        vocab_size=33,
        hidden_size=16,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=4,
        num_hidden_layers=2,
        intermediate_size=25,
        max_position_embeddings=32,
        sliding_window=4,
        tie_word_embeddings=False,
    ),
    "qwen2": dict(
        model_type="qwen2",
        vocab_size=35,
        hidden_size=24,
        num_attention_heads=6,
        num_key_value_heads=3,
        num_hidden_layers=2,
        intermediate_size=29,
        max_position_embeddings=32,
        tie_word_embeddings=True,
        use_sliding_window=True,
        sliding_window=5,
        max_window_layers=1,
        rope_parameters=dict(
            rope_type="yarn", rope_theta=100.0, factor=4.0, original_max_position_embeddings=8
        ),
    ),
    "neox": dict(
        model_type="gpt_neox",
        vocab_size=34,
        hidden_size=24,
        num_attention_heads=3,
        num_hidden_layers=2,
        intermediate_size=26,
        max_position_embeddings=32,
        tie_word_embeddings=False,
        use_parallel_residual=True,
        rope_parameters=dict(rope_type="default", rope_theta=10000.0, partial_rotary_factor=0.25),
        **NO_DROPOUT,
    ),
    "neox_sequential": dict(
        model_type="gpt_neox",
        vocab_size=34,
        hidden_size=16,
        num_attention_heads=2,
        num_hidden_layers=2,
        intermediate_size=26,
        max_position_embeddings=32,
        tie_word_embeddings=True,
        use_parallel_residual=False,
        rope_parameters=dict(rope_type="default", rope_theta=1000.0, partial_rotary_factor=1.0),
        **NO_DROPOUT,
    ),
    # the architectures of Falcon 7B, 40B, and RW, without and with ALiBi
    "falcon": dict(
        model_type="falcon",
        vocab_size=33,
        hidden_size=24,
        num_attention_heads=3,
        num_hidden_layers=2,
        alibi=False,
        multi_query=True,
        parallel_attn=True,
        bias=False,
        new_decoder_architecture=False,
        max_position_embeddings=32,
        **NO_DROPOUT,
    ),
    "falcon_groups": dict(
        model_type="falcon",
        vocab_size=33,
        hidden_size=24,
        num_attention_heads=6,
        num_kv_heads=2,
        num_hidden_layers=2,
        alibi=False,
        parallel_attn=True,
        bias=False,
        new_decoder_architecture=True,
        ffn_hidden_size=40,
        max_position_embeddings=32,
        tie_word_embeddings=False,
        **NO_DROPOUT,
    ),
    "falcon_sequential": dict(
        model_type="falcon",
        vocab_size=33,
        hidden_size=16,
        num_attention_heads=2,
        num_hidden_layers=2,
        alibi=False,
        multi_query=False,
        parallel_attn=False,
        bias=True,
        new_decoder_architecture=False,
        ffn_hidden_size=22,
        max_position_embeddings=32,
        **NO_DROPOUT,
    ),
    "falcon_alibi": dict(
        model_type="falcon",
        vocab_size=33,
        hidden_size=24,
        num_attention_heads=3,
        num_hidden_layers=2,
        alibi=True,
        multi_query=False,
        parallel_attn=False,
        bias=True,
        new_decoder_architecture=False,
        ffn_hidden_size=22,
        max_position_embeddings=32,
        **NO_DROPOUT,
    ),
    # slopes that bf16 cannot represent, and a sequence with rows that do not count
    "falcon_alibi_heads": dict(
        model_type="falcon",
        vocab_size=33,
        hidden_size=33,
        num_attention_heads=11,
        num_hidden_layers=2,
        alibi=True,
        multi_query=True,
        parallel_attn=True,
        bias=False,
        new_decoder_architecture=False,
        ffn_hidden_size=22,
        max_position_embeddings=512,
        **NO_DROPOUT,
    ),
    # rotary_pct asks for 5 of 10 columns, and transformers rotates 6
    "neox_odd": dict(
        model_type="gpt_neox",
        vocab_size=34,
        hidden_size=20,
        num_attention_heads=2,
        num_hidden_layers=2,
        intermediate_size=26,
        max_position_embeddings=32,
        tie_word_embeddings=False,
        use_parallel_residual=True,
        rope_parameters=dict(rope_type="default", rope_theta=100.0, partial_rotary_factor=0.5),
        **NO_DROPOUT,
    ),
    # config.json has original_max_position_embeddings twice: transformers reads the value beside
    # rope_parameters, and not the value inside rope_parameters (see contradict)
    "llama_original": dict(
        model_type="llama",
        vocab_size=31,
        hidden_size=18,
        num_attention_heads=1,
        num_hidden_layers=2,
        intermediate_size=21,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        original_max_position_embeddings=8,
        rope_parameters=dict(
            rope_type="llama3", rope_theta=500.0, factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0
        ),
    ),
    "qwen3": dict(
        model_type="qwen3",
        vocab_size=35,
        hidden_size=20,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=6,
        num_hidden_layers=2,
        intermediate_size=29,
        max_position_embeddings=32,
        tie_word_embeddings=True,
        use_sliding_window=True,
        sliding_window=5,
        max_window_layers=1,
        rope_parameters=dict(rope_type="default", rope_theta=1000.0),
    ),
    "qwen3_biases": dict(
        model_type="qwen3",
        vocab_size=31,
        hidden_size=18,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=8,
        num_hidden_layers=2,
        intermediate_size=21,
        max_position_embeddings=32,
        tie_word_embeddings=False,
        attention_bias=True,
    ),
    # layers with a window and layers without a window have different rotary angles
    "gemma3": dict(
        model_type="gemma3_text",
        vocab_size=37,
        hidden_size=24,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=10,
        num_hidden_layers=3,
        intermediate_size=28,
        max_position_embeddings=64,
        query_pre_attn_scalar=9,
        sliding_window=4,
        sliding_window_pattern=2,
        rope_parameters=dict(
            full_attention=dict(rope_type="linear", rope_theta=500.0, factor=4.0),
            sliding_attention=dict(rope_type="default", rope_theta=20.0),
        ),
    ),
    "gemma3_biases": dict(
        model_type="gemma3_text",
        vocab_size=33,
        hidden_size=18,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=6,
        num_hidden_layers=2,
        intermediate_size=22,
        max_position_embeddings=64,
        query_pre_attn_scalar=6,
        sliding_window=3,
        tie_word_embeddings=False,
        attention_bias=True,
    ),
}
LONG = 300


def initialise(model, rng):
    """Initialises parameters larger than usual, so that every gradient is well above rounding."""
    norm = 0 if model.config.model_type == "gemma3_text" else 1  # Gemma's norms multiply by 1 + weight
    for name, p in sorted(model.named_parameters()):
        x = rng.standard_normal(tuple(p.shape))
        x = 0.1 * x if name.endswith(".bias") else norm + 0.1 * x if p.dim() == 1 else 0.2 * x
        p.data = torch.from_numpy(x.astype(np.float32))


def make_batch(rng, vocab, longest):
    """Returns ragged sequences: one of length 1, one of the max length, and some of random lengths."""
    n = int(rng.randint(4, 6))
    lengths = [1, longest] + [int(rng.randint(2, longest)) for _ in range(n - 2)]
    lengths = [lengths[i] for i in rng.permutation(n)]
    ids = rng.randint(0, vocab, sum(lengths))
    targets = np.roll(ids, -1)
    start = np.concatenate([[0], np.cumsum(lengths)])
    targets[start[1:] - 1] = -100
    targets[rng.randint(0, len(targets), 3)] = -100
    return {
        k: torch.from_numpy(np.asarray(v).astype(np.int32))
        for k, v in (("ids", ids), ("seq_start", start), ("targets", targets))
    }


def logits_of(model, batch):
    start = batch["seq_start"].tolist()
    return torch.cat(
        [model(input_ids=batch["ids"][None, a:b].long()).logits[0] for a, b in zip(start, start[1:])]
    )


def as_here(name, x, config):
    """Returns a tensor in tinytrain's layout."""
    if config.model_type == "gpt2" and x.dim() == 2 and ".h." in name:
        return x.t()
    if "query_key_value" not in name:
        return x
    heads = config.num_attention_heads
    size = config.hidden_size // heads
    if config.model_type == "gpt_neox":
        x = x.reshape(heads, 3, size, -1)
        parts = torch.cat([x[:, part].reshape(heads * size, -1) for part in range(3)])
        return parts.squeeze(-1) if x.shape[-1] == 1 else parts
    groups = config.num_kv_heads if config.new_decoder_architecture else 1 if config.multi_query else heads
    bias = x.dim() == 1
    x = x.reshape(groups, heads // groups + 2, size, -1)
    x = torch.cat(
        [
            x[:, :-2].reshape(heads * size, -1),
            x[:, -2].reshape(groups * size, -1),
            x[:, -1].reshape(groups * size, -1),
        ]
    )
    return x[:, 0] if bias else x


def stored(x):
    x = x.detach().clone()
    x[x.abs() < 1e-12] = 0
    return x.to(torch.float32).contiguous()


def contradict(folder, model, ids):
    """Writes another number of positions into rope_parameters, where transformers does not read it."""
    path = os.path.join(folder, "config.json")
    with open(path) as f:
        config = json.load(f)
    config["rope_parameters"]["original_max_position_embeddings"] = 32
    with open(path, "w") as f:
        json.dump(config, f, indent=2, sort_keys=True)
        f.write("\n")
    again = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa")
    assert torch.equal(again(input_ids=ids).logits, model(input_ids=ids).logits)


def run(name, folder):
    os.makedirs(folder, exist_ok=True)
    rng = np.random.RandomState(100 + list(MODELS).index(name))
    settings = dict(MODELS[name])
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        setattr(config, key, None)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    initialise(model, rng)
    batches = [make_batch(rng, config.vocab_size, 17) for _ in range(STEPS)]
    golden = {f"batch{i}.{k}": v for i, b in enumerate(batches) for k, v in b.items()}
    model.save_pretrained(folder)
    for file in set(os.listdir(folder)) - {"config.json", "model.safetensors", "golden.safetensors", "lora"}:
        os.remove(os.path.join(folder, file))

    if name == "llama_original":
        contradict(folder, model.eval(), batches[0]["ids"][None].long())
    model.double().eval()
    if name == "falcon_alibi_heads":
        golden["long.ids"] = torch.from_numpy(rng.randint(0, config.vocab_size, LONG).astype(np.int32))
        golden["long.logits"] = stored(model(input_ids=golden["long.ids"][None].long()).logits[0, -8:])
    prompt = torch.from_numpy(rng.randint(0, config.vocab_size, (1, 5)))
    made = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),  # transformers would leave out tokens that equal pad_token_id
        max_new_tokens=8,
        do_sample=False,
        pad_token_id=0,
        eos_token_id=None,
    )
    golden["greedy.prompt"], golden["greedy.ids"] = prompt[0].int(), made[0, 5:].int().contiguous()
    model.train()  # each dropout rate is 0
    here = (
        "embed_out.weight" if config.model_type == "gpt_neox" else "lm_head.weight"
    )  # name of the head's weight in the file
    named = {n.replace("lm_head.weight", here): p for n, p in model.named_parameters()}
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in named.values() if p.dim() > 1], "weight_decay": 0.01},
            {"params": [p for p in named.values() if p.dim() == 1], "weight_decay": 0.0},
        ],
        lr=1e-3,
        betas=(0.9, 0.999),
        eps=1e-8,
        foreach=False,
    )
    losses, norms = [], []
    for step, batch in enumerate(batches):
        logits = logits_of(model, batch)
        loss = torch.nn.functional.cross_entropy(logits, batch["targets"].long())
        optimizer.zero_grad()
        loss.backward()
        if step == 0:
            golden["logits"], golden["loss"] = stored(logits), stored(loss.reshape(1))
            for n, p in named.items():
                golden["grad." + n] = stored(as_here(n, p.grad, config))
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=False))
        losses.append(loss)
        optimizer.step()
    golden["losses"], golden["grad_norms"] = stored(torch.stack(losses)), stored(torch.stack(norms))
    for n, p in named.items():
        golden["step5." + n] = stored(as_here(n, p, config))
    save_file(golden, os.path.join(folder, "golden.safetensors"))
    for file in os.listdir(folder):
        os.chmod(os.path.join(folder, file), 0o644)
    losses = [round(x, 4) for x in golden["losses"].tolist()]
    return f"{name}: {sum(p.numel() for p in named.values())} parameters, losses {losses}"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--check", action="store_true", help="compare with the committed files, byte for byte"
    )
    parser.add_argument("names", nargs="*", help="models to make (all)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    root = tempfile.mkdtemp() if args.check else HERE
    bad = []
    for name in args.names or MODELS:
        print(run(name, os.path.join(root, name)))
        if args.check:
            bad += filecmp.cmpfiles(
                os.path.join(root, name),
                os.path.join(HERE, name),
                os.listdir(os.path.join(HERE, name)),
                shallow=False,
            )[1]
    if bad:
        sys.exit("differs from the committed files: " + ", ".join(bad))


if __name__ == "__main__":
    main()
