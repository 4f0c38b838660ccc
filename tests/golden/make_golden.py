#!/usr/bin/env python3
"""Writes golden training runs of tiny BERT-family and ViT classifiers, computed by PyTorch and Hugging Face
transformers.

    python tests/golden/make_golden.py            writes tests/golden/{distilbert,bert,minilm,roberta,
                                                  big_bird,big_bird_full,xlm_roberta,camembert,albert,vit}/
    python tests/golden/make_golden.py --check    writes to a temporary folder and compares byte for byte
    ... bert minilm                               only these

needs: torch, torchvision, transformers, safetensors, numpy. Each folder gets

    config.json, model.safetensors   the starting checkpoint, with the names that transformers saves. `minilm`
                                     holds the body only and without the "bert." prefix, as the
                                     sentence-transformers MiniLM files do.
    golden.safetensors               the reference, all float32 or int32:
        batchB.input_ids       (tokens)       B = 0..4 (0..19 in xlm_roberta, camembert and albert); all
                                              sequences one after another, no padding, never id 0
        batchB.token_type_ids  (tokens)       random 0/1 for `bert`, `big_bird` and `albert`, zeros elsewhere
        batchB.seq_start       (n_seqs + 1)   sequence s is tokens seq_start[s] .. seq_start[s + 1] - 1
        batchB.labels          (n_seqs)
        batchB.pixels          (n_seqs, 12 * 12 * 3)  `vit`, instead of the first three: 8-bit images, rows
                                              from the top, R G B together
        logits (n_seqs, classes), loss (1)    of batch 0 with the starting weights; loss is the mean
                                              cross-entropy. The logits of `big_bird` are those of
                                              model.eval(), where block 0 stands for each random block
        grad.NAME                             gradient of that loss, before clipping
        step5.NAME                            parameter after 5 steps, on batches 0..4
        losses, grad_norms                    of a step on each batch; the norm is over all parameters, before
                                              clipping
        classifier.weight, classifier.bias    `minilm` only: the starting classifier, which its checkpoint
                                              lacks
        texts (bytes), text_logits            `roberta` only: TEXTS, by lines, and their logits with the
                                              starting weights. The folder's tokenizer.json is that of
                                              bpe/roberta
        positions.20           (26, hidden)   `vit` only: position embeddings interpolated to images of
                                              20 x 20
      torchvision.safetensors                 `vit` only: the same weights in torchvision's naming
      NAME is a name of the sequence-classification class (with "bert." for `minilm`).

Optimizer: AdamW lr 1e-3, betas 0.9 0.999, eps 1e-8, weight decay 0.01 except on biases, LayerNorm weights and
class tokens; gradients clipped to a global norm of 1.0; constant learning rate; no dropout.

For comparisons
  - The reference runs in float64 from float32 weights. Only stored numbers are rounded, so the reference is
    exact for float32 purposes.
  - Key biases (k_lin.bias, key.bias) do not change a softmax: their exact gradient is zero. Numbers below
    1e-12 are stored as zero. Float32 code sees rounding noise there, which Adam divides by its own size, so
    step5 of a key bias may differ by up to 5 * lr and must not be compared tightly. Nothing else depends on
    key biases.
  - Any other element whose gradient is near float32 noise has an Adam step of the right bound, but not of the
    right direction. Compare step5 by relative L2 distance of the *change* or with a
    tolerance, not element by element to 1e-6.
  - Weight decay also moves embedding rows that no batch uses (by lr * decay * weight a step).
  - transformers' word embedding has padding_idx 0: row 0 would get no gradient even if used. So id 0 is never
    used here.
  - attn_implementation="eager": the sdpa path of DistilBERT and BERT picks fused kernels by shape and mask,
    which round differently. ViT uses sdpa: its eager path computes the softmax in float32, its sdpa path does
    not.
  - BigBird gets each sequence by itself: in a padded batch the last block would be the longest sequence's.
    Sequences of at most (5 + 2 * num_random_blocks) * block_size tokens attend in full. transformers does not
    use BigBird's pooler, which gets no gradient.
  - PyTorch gets padded sequences with an attention mask. The script asserts that the content of the padding
    does not matter.
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
from safetensors.torch import load_file, save_file
from transformers import (AlbertConfig, AlbertForSequenceClassification, BertConfig, CamembertConfig, CamembertForSequenceClassification,
                          XLMRobertaConfig, XLMRobertaForSequenceClassification, BigBirdConfig, BigBirdForSequenceClassification, RobertaConfig,
                          RobertaForSequenceClassification, BertForSequenceClassification, BertModel,
                          DistilBertConfig, DistilBertForSequenceClassification, PreTrainedTokenizerFast, ViTConfig, ViTForImageClassification)

# TEXTS: a text with a character of several bytes, a text with spaces in a row, a text of more tokens than
# positions, and an empty text.
TEXTS = ["Hello, world!", "d\u00e9j\u00e0  vu: \u4f60\u597d", "A text that has more tokens than the model has positions, and is cut.", ""]
HERE = os.path.dirname(os.path.abspath(__file__))
STEPS, LONG = 5, 20     # LONG: steps of the folders in LONGER
LONGER = "xlm_roberta", "camembert", "albert"
OFFSET = "roberta", "xlm-roberta", "camembert"  # model types whose positions start at pad_token_id + 1


def shapes():
    """Returns name -> (class, config, seed, random token types)."""
    off = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    return {
        "distilbert": (DistilBertForSequenceClassification,
                       DistilBertConfig(dim=36, n_heads=3, hidden_dim=52, n_layers=2, vocab_size=101, max_position_embeddings=23,
                                        num_labels=3, activation="gelu", dropout=0.0, attention_dropout=0.0,
                                        seq_classif_dropout=0.0), 11, False),
        "bert": (BertForSequenceClassification,
                 BertConfig(hidden_size=32, num_attention_heads=2, intermediate_size=44, num_hidden_layers=2, vocab_size=97,
                            max_position_embeddings=19, type_vocab_size=2, num_labels=2, hidden_act="gelu", **off), 12, True),
        # two layers: with three, golden.safetensors would pass 400 KB
        "minilm": (BertForSequenceClassification,
                   BertConfig(hidden_size=48, num_attention_heads=12, intermediate_size=64, num_hidden_layers=2, vocab_size=89,
                              max_position_embeddings=21, type_vocab_size=2, num_labels=2, hidden_act="gelu", **off), 13, False),
        "roberta": (RobertaForSequenceClassification,
                    RobertaConfig(hidden_size=16, num_attention_heads=2, intermediate_size=28, num_hidden_layers=2, vocab_size=520,
                                  max_position_embeddings=21, type_vocab_size=1, num_labels=3, pad_token_id=1, layer_norm_eps=1e-5,
                                  **off), 15, False),
        "big_bird": (BigBirdForSequenceClassification,
                     BigBirdConfig(hidden_size=24, num_attention_heads=3, intermediate_size=36, num_hidden_layers=2, vocab_size=61,
                                   max_position_embeddings=52, type_vocab_size=2, num_labels=3, block_size=4, num_random_blocks=2,
                                   rescale_embeddings=True, **off), 16, True),
        "big_bird_full": (BigBirdForSequenceClassification,
                          BigBirdConfig(hidden_size=20, num_attention_heads=2, intermediate_size=28, num_hidden_layers=1, vocab_size=31,
                                        max_position_embeddings=18, type_vocab_size=2, num_labels=2, attention_type="original_full",
                                        use_bias=False, **off), 17, True),
        # 2 token types, which no published XLM-RoBERTa has
        "xlm_roberta": (XLMRobertaForSequenceClassification,
                        XLMRobertaConfig(hidden_size=15, num_attention_heads=3, intermediate_size=23, num_hidden_layers=2, vocab_size=53,
                                         max_position_embeddings=19, type_vocab_size=2, num_labels=3, layer_norm_eps=1e-5, **off), 18, True),
        "camembert": (CamembertForSequenceClassification,
                      CamembertConfig(hidden_size=14, num_attention_heads=2, intermediate_size=25, num_hidden_layers=1, vocab_size=47,
                                      max_position_embeddings=17, type_vocab_size=1, num_labels=2, layer_norm_eps=1e-5, **off), 19, False),
        "albert": (AlbertForSequenceClassification,
                   AlbertConfig(embedding_size=9, hidden_size=21, num_attention_heads=3, intermediate_size=34, num_hidden_layers=3, vocab_size=43,
                                max_position_embeddings=18, type_vocab_size=2, num_labels=3, classifier_dropout_prob=0.0, **off), 20, True),
        "vit": (ViTForImageClassification,
                ViTConfig(hidden_size=36, num_attention_heads=3, intermediate_size=52, num_hidden_layers=2, image_size=12, patch_size=4,
                          num_labels=3, hidden_act="gelu", **off), 14, False),
    }


def spelled(name):
    """Returns the name that a parameter has in checkpoints. transformers 5 has other names in its ViT."""
    for old, new in (("vit.layers.", "vit.encoder.layer."), ("attention.q_proj", "attention.attention.query"), ("attention.k_proj", "attention.attention.key"),
                     ("attention.v_proj", "attention.attention.value"), ("attention.o_proj", "attention.output.dense"), ("mlp.fc1", "intermediate.dense"), ("mlp.fc2", "output.dense")):
        name = name.replace(old, new) if name.startswith("vit.") else name
    return name


def decays(name):
    return not (name.endswith(".bias") or "layernorm" in name.lower() or "layer_norm" in name.lower() or name.endswith("cls_token"))


def initialise(model, rng):
    """Initialises parameters larger than usual, so that every gradient is well above rounding."""
    for name, p in sorted((spelled(n), p) for n, p in model.named_parameters()):
        x = rng.standard_normal(tuple(p.shape))
        if name.endswith(".bias"):
            x = 0.1 * x
        elif p.dim() == 1:
            x = 1 + 0.1 * x
        else:
            x = 0.2 * x
        p.data = torch.from_numpy(x.astype(np.float32))


def make_images(rng, config):
    n = int(rng.randint(3, 6))
    pixels = rng.randint(0, 256, (n, config.image_size * config.image_size * config.num_channels))
    return {"pixels": torch.from_numpy(pixels.astype(np.uint8)), "labels": torch.from_numpy(rng.randint(0, config.num_labels, n).astype(np.int32))}


def make_batch(rng, config, random_types):
    """Returns ragged sequences: one of length 1, one of the max length, and some of random lengths."""
    if config.model_type == "vit":
        return make_images(rng, config)
    longest = config.max_position_embeddings
    first = 1
    if config.model_type in OFFSET:
        first, longest = config.pad_token_id + 1, longest - config.pad_token_id - 1
    n = int(rng.randint(4, 7))
    lengths = [1, longest] + [int(rng.randint(2, longest)) for _ in range(n - 2)]
    if config.model_type == "big_bird":
        lengths[2] = longest - 11      # the last block of this sequence is not whole
    lengths = [lengths[i] for i in rng.permutation(n)]
    tokens = sum(lengths)
    types = rng.randint(0, 2, tokens) if random_types else np.zeros(tokens)
    as_i32 = lambda x: torch.from_numpy(np.asarray(x).astype(np.int32))
    return {"input_ids": as_i32(rng.randint(first, config.vocab_size, tokens)), "token_type_ids": as_i32(types),
            "seq_start": as_i32(np.concatenate([[0], np.cumsum(lengths)])),
            "labels": as_i32(rng.randint(0, config.num_labels, n))}


def logits_of_big_bird(model, batch):
    """Returns the logits, computed sequence by sequence. A short sequence switches the model to full
    attention until the attention type is set again."""
    start, logits, kind = batch["seq_start"].tolist(), [], model.config.attention_type
    for a, b in zip(start, start[1:]):
        model.bert.set_attention_type(kind)
        logits.append(model(input_ids=batch["input_ids"][None, a:b].long(), token_type_ids=batch["token_type_ids"][None, a:b].long()).logits)
    model.bert.set_attention_type(kind)
    return torch.cat(logits)


def logits_of(model, batch, pad_id=None):
    """Pads the sequences, masks the padding, and runs the model. Returns (n_seqs, classes)."""
    if model.config.model_type == "big_bird":
        return logits_of_big_bird(model, batch)
    if pad_id is None:
        pad_id = getattr(model.config, "pad_token_id", 0)
    if model.config.model_type == "vit":
        return model(pixel_values=normalised(batch, model)).logits
    start = batch["seq_start"].tolist()
    n, longest = len(start) - 1, max(b - a for a, b in zip(start, start[1:]))
    ids = torch.full((n, longest), pad_id)
    types, mask = torch.zeros(n, longest, dtype=torch.long), torch.zeros(n, longest, dtype=torch.long)
    for s, (a, b) in enumerate(zip(start, start[1:])):
        ids[s, :b - a], types[s, :b - a], mask[s, :b - a] = batch["input_ids"][a:b], batch["token_type_ids"][a:b], 1
    kind = {} if model.config.model_type == "distilbert" else {"token_type_ids": types}
    return model(input_ids=ids, attention_mask=mask, **kind).logits


def normalised(batch, model):
    """Returns (n, channels, height, width), normalised with mean and deviation 0.5."""
    side = model.config.image_size
    x = batch["pixels"].reshape(-1, side, side, 3).permute(0, 3, 1, 2).to(next(model.parameters()).dtype)
    return (x / 255 - 0.5) / 0.5


def save_torchvision(model, batch, path):
    """Loads the weights into torchvision's model, checks that its logits equal those of transformers' model,
    and saves the weights in torchvision's naming."""
    from torchvision.models.vision_transformer import VisionTransformer
    c, old = model.config, {spelled(n): x for n, x in model.state_dict().items()}
    other = VisionTransformer(c.image_size, c.patch_size, c.num_hidden_layers, c.num_attention_heads, c.hidden_size, c.intermediate_size,
                              num_classes=c.num_labels, norm_layer=lambda n: torch.nn.LayerNorm(n, eps=c.layer_norm_eps)).double()
    new = {"class_token": old["vit.embeddings.cls_token"], "encoder.pos_embedding": old["vit.embeddings.position_embeddings"]}
    for side in ("weight", "bias"):
        new[f"conv_proj.{side}"] = old[f"vit.embeddings.patch_embeddings.projection.{side}"]
        new[f"encoder.ln.{side}"] = old[f"vit.layernorm.{side}"]
        new[f"heads.head.{side}"] = old[f"classifier.{side}"]
        for k in range(c.num_hidden_layers):
            a, b = f"vit.encoder.layer.{k}.", f"encoder.layers.encoder_layer_{k}."
            new[b + f"self_attention.in_proj_{side}"] = torch.cat([old[a + f"attention.attention.{x}.{side}"] for x in ("query", "key", "value")])
            for x, y in (("ln_1", "layernorm_before"), ("self_attention.out_proj", "attention.output.dense"), ("ln_2", "layernorm_after"),
                         ("mlp.0", "intermediate.dense"), ("mlp.3", "output.dense")):
                new[b + f"{x}.{side}"] = old[a + f"{y}.{side}"]
    other.load_state_dict(new)
    other.eval()
    error = (other(normalised(batch, model)) - logits_of(model, batch)).abs().max().item()
    assert error < 1e-12, f"torchvision's model differs by {error}"
    save_file({n: stored(x) for n, x in other.state_dict().items()}, path)


def add_texts(model, folder, golden):
    """Adds texts and their logits, computed as a user of the folder would compute them."""
    shutil.copy(os.path.join(HERE, "bpe", "roberta", "tokenizer.json"), folder)
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=os.path.join(folder, "tokenizer.json"), model_max_length=19)
    model.eval()
    with torch.no_grad():
        golden["text_logits"] = stored(torch.cat([model(input_ids=tokenizer(t, truncation=True, return_tensors="pt")["input_ids"]).logits for t in TEXTS]))
    golden["texts"] = torch.tensor(list("\n".join(TEXTS).encode()), dtype=torch.uint8)


def stored(x):
    x = x.detach().clone()
    x[x.abs() < 1e-12] = 0
    return x.to(torch.float32).contiguous()


def run(name, folder):
    cls, config, seed, random_types = shapes()[name]
    os.makedirs(folder, exist_ok=True)
    rng = np.random.RandomState(seed)      # a legacy generator, with equal numbers in all versions of numpy
    config._attn_implementation = "sdpa" if name == "vit" else "eager"
    model = cls(config)
    initialise(model, rng)
    batches = [make_batch(rng, config, random_types) for _ in range(LONG if name in LONGER else STEPS)]
    golden = {f"batch{i}.{k}": v for i, b in enumerate(batches) for k, v in b.items()}

    if name == "minilm":
        body = BertModel(config, add_pooling_layer=True)
        body.load_state_dict(model.bert.state_dict())
        body.save_pretrained(folder)
        golden["classifier.weight"] = model.classifier.weight.detach().clone()
        golden["classifier.bias"] = model.classifier.bias.detach().clone()
    else:
        model.save_pretrained(folder)

    if name == "roberta":
        add_texts(model.double(), folder, golden)
    model.double().train()                 # train mode; each dropout rate is 0
    named = {spelled(n): p for n, p in model.named_parameters()}
    optimizer = torch.optim.AdamW([{"params": [p for n, p in named.items() if decays(n)], "weight_decay": 0.01},
                                   {"params": [p for n, p in named.items() if not decays(n)], "weight_decay": 0.0}],
                                  lr=1e-3, betas=(0.9, 0.999), eps=1e-8, foreach=False)
    losses, norms = [], []
    for step, batch in enumerate(batches):
        logits = logits_of(model, batch)
        if name == "vit" and step == 0:
            save_torchvision(model, batch, os.path.join(folder, "torchvision.safetensors"))
            golden["positions.20"] = stored(model.vit.embeddings.interpolate_pos_encoding(torch.zeros(1, 26, config.hidden_size).double(), 20, 20)[0])
        other_padding = logits if name == "vit" else logits_of(model, batch, pad_id=config.vocab_size - 1)
        assert (logits - other_padding).abs().max() < 1e-12, "padding changes the result"
        loss = torch.nn.functional.cross_entropy(logits, batch["labels"].long())
        optimizer.zero_grad()
        loss.backward()
        if step == 0:
            golden["loss"] = stored(loss.reshape(1))
            with torch.no_grad():
                golden["logits"] = stored(logits_of(model.eval(), batch))
            model.train()
            for n, p in named.items():
                if p.grad is not None:
                    golden["grad." + n] = stored(p.grad)
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=False))
        losses.append(loss)
        optimizer.step()
        if step == STEPS - 1:
            for n, p in named.items():
                golden["step5." + n] = stored(p)
    golden["losses"], golden["grad_norms"] = stored(torch.stack(losses)), stored(torch.stack(norms))
    save_file(golden, os.path.join(folder, "golden.safetensors"))
    for file in os.listdir(folder):
        os.chmod(os.path.join(folder, file), 0o644)
    return verify(name, folder)


def verify(name, folder):
    """Loads the folder in float32, like a user, and compares logits and loss with the stored numbers."""
    cls = shapes()[name][0]
    golden = load_file(os.path.join(folder, "golden.safetensors"))
    model = cls.from_pretrained(folder, attn_implementation="eager").eval()
    if name == "minilm":
        model.classifier.weight.data, model.classifier.bias.data = golden["classifier.weight"], golden["classifier.bias"]
    batch = {k[len("batch0."):]: v for k, v in golden.items() if k.startswith("batch0.")}
    with torch.no_grad():
        logits = logits_of(model, batch)
    error = (logits - golden["logits"]).abs().max().item()
    assert error < 1e-5, (name, error)
    # checks that the stored gradient is the gradient of the stored loss
    model.train()
    loss = torch.nn.functional.cross_entropy(logits_of(model, batch), batch["labels"].long())
    loss.backward()
    worst = max(((p.grad - golden["grad." + spelled(n)]).norm() / (golden["grad." + spelled(n)].norm() + 1e-3)).item()
                for n, p in model.named_parameters() if p.grad is not None)
    assert worst < 1e-3 and abs(loss.item() - golden["loss"].item()) < 1e-5, (name, worst)
    return f"{name}: float32 logits within {error:.1e}, gradients within {worst:.1e} of the float64 reference; " \
           f"losses {[round(x, 4) for x in golden['losses'].tolist()]}, norms {[round(x, 3) for x in golden['grad_norms'].tolist()]}"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="of folders; default: all")
    parser.add_argument("--check", action="store_true", help="compare with the committed files, byte for byte")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    root = tempfile.mkdtemp() if args.check else HERE
    bad = []
    for name in args.names or shapes():
        print(run(name, os.path.join(root, name)))
        if args.check:
            bad += filecmp.cmpfiles(os.path.join(root, name), os.path.join(HERE, name),
                                    os.listdir(os.path.join(HERE, name)), shallow=False)[1]
    if bad:
        sys.exit("differs from the committed files: " + ", ".join(bad))


if __name__ == "__main__":
    main()
