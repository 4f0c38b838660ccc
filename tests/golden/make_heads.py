#!/usr/bin/env python3
"""Writes golden training runs of tiny encoders with each head, and of decoders that classify texts, computed by PyTorch and Hugging Face
transformers, and embeddings that sentence-transformers computes.

    python tests/golden/make_heads.py            writes tests/golden/heads/{NAME}/
    python tests/golden/make_heads.py --check    writes to a temporary folder and compares byte for byte
    ... bert_tags embed_mean                     only these

needs: torch, transformers, sentence-transformers, safetensors, numpy. Each folder gets

    config.json, model.safetensors   the starting checkpoint, as transformers saves it
    golden.safetensors               the reference, all float32 or int32:
        batchB.input_ids (tokens), batchB.token_type_ids (tokens), batchB.seq_start (n_seqs + 1)
                                     B = 0..19; all sequences one after another, no padding, never id 0
        batchB.tags (tokens)         KIND_tags: a class, or -100 for a quarter of the tokens
        batchB.masked (n), batchB.targets (n)   KIND_masked_lm: rows of batchB.input_ids, and a token for each
        batchB.label_values (n_seqs, n)   KIND_labels: 0 or 1; KIND_scores: numbers
        batchB.labels (n_seqs)       KIND_classes: a class
        logits                       of batch 0 with the starting weights: (tokens, n) or (n_seqs, n);
                                     KIND_masked_lm: of the masked rows, (n, vocabulary)
        losses (20)                  of 20 steps, as make_golden.py trains
        hidden (layers + 1, tokens, hidden)   embed_*: the hidden states of batch 0
        embeddings (n_seqs, hidden)  embed_*: those of batch 0
    modules.json, 1_Pooling and so on   embed_*: as sentence-transformers saves them

The reference runs in float64 from float32 weights, sequence by sequence. The script asserts that the loss of a
padded batch, as transformers computes it from `labels`, is the stored one, and that sentence-transformers'
embeddings of the padded batch are the stored ones.
"""
import argparse
import filecmp
import os
import shutil
import sys
import tempfile

os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from make_golden import LONG, OFFSET, decays, initialise, make_batch, stored
from safetensors.torch import save_file

HERE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "heads")
OFF = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
SIZES = dict(hidden_size=12, num_attention_heads=3, intermediate_size=19, num_hidden_layers=2, vocab_size=37, max_position_embeddings=13)
KINDS = {
    "distilbert": ("DistilBert", dict(dim=12, n_heads=3, hidden_dim=19, n_layers=2, vocab_size=37, max_position_embeddings=13, dropout=0.0, attention_dropout=0.0,
                                      seq_classif_dropout=0.0)),
    "bert": ("Bert", dict(SIZES, **OFF)),
    "roberta": ("Roberta", dict(SIZES, type_vocab_size=1, **OFF)),
    "xlm_roberta": ("XLMRoberta", dict(SIZES, type_vocab_size=1, **OFF)),
    "camembert": ("Camembert", dict(SIZES, type_vocab_size=1, **OFF)),
    "albert": ("Albert", dict(SIZES, embedding_size=7, classifier_dropout_prob=0.0, **OFF)),
    "big_bird": ("BigBird", dict(SIZES, attention_type="original_full", sep_token_id=3, **OFF)),
}
DECODER = dict(hidden_size=12, num_attention_heads=2, num_key_value_heads=1, intermediate_size=19, num_hidden_layers=2, vocab_size=37,
               max_position_embeddings=13, pad_token_id=0)
DECODERS = {
    "gpt2": ("GPT2", dict(n_embd=12, n_head=3, n_inner=19, n_layer=2, vocab_size=37, n_positions=13, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
                          pad_token_id=0, bos_token_id=1, eos_token_id=1)),
    "llama": ("Llama", DECODER),
    "qwen3": ("Qwen3", dict(DECODER, head_dim=4)),
    "gemma3": ("Gemma3Text", dict(DECODER, head_dim=4, sliding_window=4, sliding_window_pattern=2)),
}
MODERN = dict(hidden_size=12, num_attention_heads=3, intermediate_size=19, num_hidden_layers=4, vocab_size=37, max_position_embeddings=13, pad_token_id=0,
              bos_token_id=1, eos_token_id=2, cls_token_id=1, sep_token_id=2, local_attention=4, global_attn_every_n_layers=2)
MODERNS = {
    "modern": ("ModernBert", MODERN),
    "modern_biases": ("ModernBert", dict(MODERN, num_hidden_layers=2, attention_bias=True, mlp_bias=True, norm_bias=True, classifier_bias=True,
                                         classifier_pooling="mean", local_attention=6)),
}
PROBLEMS = {"labels": "multi_label_classification", "scores": "regression"}
# name -> (kind, task, outputs)
HEADS = {f"{kind}_tags": (kind, "tags", 5) for kind in KINDS}
HEADS.update(bert_labels=("bert", "labels", 4), roberta_labels=("roberta", "labels", 3), distilbert_scores=("distilbert", "scores", 1),
             albert_scores=("albert", "scores", 3))
HEADS.update(gpt2_classes=("gpt2", "classes", 3), llama_scores=("llama", "scores", 1), qwen3_labels=("qwen3", "labels", 3),
             gemma3_classes=("gemma3", "classes", 4))
HEADS.update(modern_tags=("modern", "tags", 5), modern_classes=("modern", "classes", 4), modern_biases_scores=("modern_biases", "scores", 2))
HEADS.update({f"{kind}_masked_lm": (kind, "masked_lm", 37) for kind in KINDS})
HEADS.update({f"{kind}_masked_lm": (kind, "masked_lm", 37) for kind in MODERNS})
EMBEDDERS = {"embed_mean": ("bert", "mean", True), "embed_cls": ("xlm_roberta", "cls", False)}


def has_types(config):
    """Returns whether the model takes token types. GPT-2 would look them up among its tokens."""
    return config.model_type not in ("distilbert", "modernbert", "gpt2", "llama", "qwen3", "gemma3_text")


def forward(model, batch, **more):
    """Runs the model on each sequence by itself. Returns the outputs."""
    start, out = batch["seq_start"].tolist(), []
    for a, b in zip(start, start[1:]):
        types = {"token_type_ids": batch["token_type_ids"][None, a:b].long()} if has_types(model.config) else {}
        out.append(model(input_ids=batch["input_ids"][None, a:b].long(), **types, **more))
    return out


def logits_of(model, batch):
    if "masked" in batch:
        return torch.cat([x.logits[0] for x in forward(model, batch)])[batch["masked"].long()]
    return torch.cat([x.logits.reshape(-1, model.config.num_labels) for x in forward(model, batch)])


def loss_of(task, logits, batch):
    if task in ("tags", "masked_lm"):
        return F.cross_entropy(logits, batch["tags" if task == "tags" else "targets"].long())
    if task == "classes":
        return F.cross_entropy(logits, batch["labels"].long())
    values = batch["label_values"].to(logits.dtype)
    return F.binary_cross_entropy_with_logits(logits, values) if task == "labels" else F.mse_loss(logits, values)


def padded(batch, pad, config):
    """Returns the batch as transformers takes it, with its targets."""
    start = batch["seq_start"].tolist()
    n, longest = len(start) - 1, max(b - a for a, b in zip(start, start[1:]))
    ids, types, mask, tags = torch.full((n, longest), pad), *(torch.zeros(n, longest, dtype=torch.long) for _ in range(2)), torch.full((n, longest), -100)
    for s, (a, b) in enumerate(zip(start, start[1:])):
        ids[s, :b - a], types[s, :b - a], mask[s, :b - a] = batch["input_ids"][a:b], batch["token_type_ids"][a:b], 1
        if "tags" in batch:
            tags[s, :b - a] = batch["tags"][a:b]
        for row, target in zip(batch.get("masked", ()), batch.get("targets", ())):
            if a <= row < b:
                tags[s, row - a] = target
    out = dict(input_ids=ids, attention_mask=mask)
    if has_types(config):
        out["token_type_ids"] = types
    if "tags" in batch or "masked" in batch:
        out["labels"] = tags
    elif "labels" in batch:
        out["labels"] = batch["labels"].long()
    elif "label_values" in batch:
        out["labels"] = batch["label_values"].double()
    return out


def head(name, folder):
    kind, task, outputs = HEADS[name]
    class_name, settings = {**KINDS, **DECODERS, **MODERNS}[kind]
    rng = np.random.RandomState(100 + list(HEADS).index(name))
    problem = {"problem_type": PROBLEMS[task]} if task in PROBLEMS else {}
    if task != "masked_lm":
        problem["num_labels"] = outputs
    config = getattr(transformers, class_name + "Config")(**problem, **settings)
    config._attn_implementation = "eager" if kind in KINDS else "sdpa"
    which = {"tags": "ForTokenClassification", "masked_lm": "ForMaskedLM"}.get(task, "ForSequenceClassification")
    model = getattr(transformers, class_name + which)(config)
    initialise(model, rng)
    for p in model.parameters():
        p.data -= float(p.dim() == 1 and kind == "gemma3")  # Gemma's norms multiply by 1 + weight
    batches = []
    for _ in range(LONG):
        batch = make_batch(rng, config, kind in ("bert", "albert", "big_bird"))
        n = len(batch["labels"] if task == "classes" else batch.pop("labels"))
        if task == "classes":
            pass
        elif task == "tags":
            tokens = len(batch["input_ids"])
            batch["tags"] = torch.from_numpy(np.where(rng.rand(tokens) < 0.25, -100, rng.randint(0, outputs, tokens)).astype(np.int32))
        elif task == "masked_lm":
            rows = np.flatnonzero(rng.rand(len(batch["input_ids"])) < 0.3) if len(batches) else np.arange(3)
            rows = rows if len(rows) else np.array([0])
            batch["masked"] = torch.from_numpy(rows.astype(np.int32))
            batch["targets"] = torch.from_numpy(rng.randint(0, outputs, len(rows)).astype(np.int32))
        else:
            values = rng.randint(0, 2, (n, outputs)) if task == "labels" else rng.standard_normal((n, outputs))
            batch["label_values"] = torch.from_numpy(values.astype(np.float32))
        batches.append(batch)
    model.save_pretrained(folder)
    golden = {f"batch{i}.{k}": v for i, b in enumerate(batches) for k, v in b.items()}
    model.double().train()
    with torch.no_grad():
        logits = logits_of(model, batches[0])
        golden["logits"] = stored(logits)
        # Models not in KINDS compute some steps in float32. Their texts may have token 1, but not token 0.
        newer = kind not in KINDS
        theirs = model(**padded(batches[0], 0 if newer else 1, config)).loss
        assert abs(theirs - loss_of(task, logits, batches[0])) < (1e-6 if newer else 1e-12), name
    named = dict(model.named_parameters())
    decayed = {n for n, p in named.items() if (decays(n) if kind in KINDS else p.dim() > 1)}
    optimizer = torch.optim.AdamW([{"params": [p for n, p in named.items() if n in decayed], "weight_decay": 0.01},
                                   {"params": [p for n, p in named.items() if n not in decayed], "weight_decay": 0.0}],
                                  lr=1e-3, betas=(0.9, 0.999), eps=1e-8, foreach=False)
    losses = []
    for batch in batches:
        loss = loss_of(task, logits_of(model, batch), batch)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=False)
        optimizer.step()
        losses.append(loss)
    golden["losses"] = stored(torch.stack(losses))
    save_file(golden, os.path.join(folder, "golden.safetensors"))
    return f"{name}: losses {[round(x, 4) for x in golden['losses'].tolist()]}"


def embedder(name, folder):
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer
    kind, pooling, normalize = EMBEDDERS[name]
    class_name, settings = KINDS[kind]
    rng = np.random.RandomState(200 + list(EMBEDDERS).index(name))
    config = getattr(transformers, class_name + "Config")(**settings)
    model = getattr(transformers, class_name + "Model")(config)
    initialise(model, rng)
    batch = make_batch(rng, config, kind == "bert")
    del batch["labels"]
    base = tempfile.mkdtemp()
    model.save_pretrained(base)
    letters = [chr(ord("a") + k) for k in range(26)]
    vocab = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"] + letters
    with open(os.path.join(base, "vocab.txt"), "w") as file:
        file.write("\n".join(vocab) + "\n")
    transformers.BertTokenizerFast(os.path.join(base, "vocab.txt"), model_max_length=11).save_pretrained(base)
    body = Transformer(base, max_seq_length=11)
    whole = SentenceTransformer(modules=[body, Pooling(12, pooling)] + [Normalize()] * normalize, device="cpu")
    whole.save(folder)
    for file in os.listdir(folder):
        if file.startswith(("README", "tokenizer", "vocab", "special", "config_sentence")):
            os.remove(os.path.join(folder, file))
    model.double().eval()
    with torch.no_grad():
        states = [torch.cat([x.hidden_states[k][0] for x in forward(model, batch, output_hidden_states=True)]) for k in range(config.num_hidden_layers + 1)]
        start = batch["seq_start"].tolist()
        rows = [states[-1][a:b] for a, b in zip(start, start[1:])]
        result = torch.stack([x.mean(0) if pooling == "mean" else x[0] for x in rows])
        result = F.normalize(result) if normalize else result
        theirs = whole.double()(padded(batch, 1, config))["sentence_embedding"]
        assert (theirs - result).abs().max() < 1e-12, name
    golden = {f"batch0.{k}": v for k, v in batch.items()}
    golden.update(hidden=stored(torch.stack(states)), embeddings=stored(result))
    save_file(golden, os.path.join(folder, "golden.safetensors"))
    shutil.rmtree(base)
    return f"{name}: {result.shape[0]} embeddings"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="of folders; default: all")
    parser.add_argument("--check", action="store_true", help="compare with the committed files, byte for byte")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    root = tempfile.mkdtemp() if args.check else HERE
    bad = []
    for name in args.names or [*HEADS, *EMBEDDERS]:
        folder = os.path.join(root, name)
        os.makedirs(folder, exist_ok=True)
        print((head if name in HEADS else embedder)(name, folder))
        for place, _, files in os.walk(folder):
            for file in files:
                os.chmod(os.path.join(place, file), 0o644)
        if args.check:
            bad += [f"{name}/{x}" for x in filecmp.cmpfiles(folder, os.path.join(HERE, name), os.listdir(os.path.join(HERE, name)), shallow=False)[1]]
    if bad:
        sys.exit("differs from the committed files: " + ", ".join(bad))


if __name__ == "__main__":
    main()
