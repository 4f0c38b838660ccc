#!/usr/bin/env python3
"""Trains each task on IMDb's reviews, here and in PyTorch, and compares the losses of all steps.

    python bench/task_losses.py --imdb aclImdb [--only TASK] [--steps 200] [--program build/task_losses]
        [--tolerance 0.01]

The tasks, all made of the reviews' own texts and ratings:
    pairs    class: whether a review, the second text, has a word of the theme that the first text names
    scores   the rating of the review, 1 to 10
    tags     of each word: B-NAME (a capital letter, not after a full stop), B-NUMBER (digits), B-GOOD and
             B-BAD (a list of words each), else O
    labels   each of five themes of which the review has a word
    embed    the halves of a review are a pair: the contrastive loss of sentence-transformers
             (MultipleNegativesRankingLoss), and, as "embed, in 4 parts", tinytrain's step of 4
             micro-batches with the negatives of the whole step

Each task gets a table of 16 reviews for each step, chosen by random.Random(1), and a small BERT with seeded
random weights and the vocabulary of examples/data. bench/task_losses.c reads table and folder and trains by
tinytrain's tokenizer and loader; here transformers' tokenizer and models do the same: no dropout, texts cut
to 128 tokens, AdamW (betas 0.9 0.999, eps 1e-8, weight decay 0.01 except on biases and LayerNorm weights),
gradients clipped to norm 1, lr 5e-4 with a tenth of the steps as warm-up and then linear decay to 0. Prints
the losses at the beginning and the end and their relative differences. The status is 1 if a difference, of
a step or of the mean of the last quarter, exceeds --tolerance.

needs: torch, transformers; for embed sentence-transformers."""
import argparse
import json
import os
import random
import subprocess
import sys
import tempfile

os.environ.setdefault("HF_HUB_OFFLINE", "1")
import torch
import transformers

BATCH, MAX_TOKENS, LR = 16, 128, 5e-4
VOCABULARY = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "examples", "data", "vocab.txt")
GOOD = set("good great best excellent wonderful perfect love loved beautiful brilliant amazing fun".split())
BAD = set("bad worst worse boring awful terrible poor stupid waste dull horrible hate".split())
THEMES = {"acting": "actor actors actress acting cast performance performances",
          "humour": "funny comedy humor humour laugh laughs jokes",
          "music": "music song songs score soundtrack singing",
          "story": "story plot script ending twist",
          "terror": "horror scary blood killer monster gore"}
# task -> (suffix of the class, problem_type, names of the outputs)
HEADS = {"pairs": ("SequenceClassification", "single_label_classification", ["no", "yes"]),
         "scores": ("SequenceClassification", "regression", ["LABEL_0"]),
         "tags": ("TokenClassification", None, ["B-BAD", "B-GOOD", "B-NAME", "B-NUMBER", "O"]),
         "labels": ("SequenceClassification", "multi_label_classification", sorted(THEMES)),
         "embed": (None, None, []), "embed, in 4 parts": (None, None, [])}


def reviews(folder, label, n):
    """Returns (text, rating) of n reviews."""
    folder = os.path.join(folder, "train", label)
    names = sorted(os.listdir(folder))
    random.Random(1).shuffle(names)
    for name in names[:n]:
        with open(os.path.join(folder, name), encoding="utf-8") as file:
            yield file.read().replace("<br />", " "), int(name.split("_")[1].split(".")[0])


def bare(word):
    return word.strip(".,;:!?\"'()").lower()


def tag(word, before):
    if bare(word) in GOOD or bare(word) in BAD:
        return "B-GOOD" if bare(word) in GOOD else "B-BAD"
    if any(c.isdigit() for c in word):
        return "B-NUMBER"
    return "B-NAME" if word[0].isupper() and before[-1] not in ".!?" else "O"


def rows_of(task, folder, n):
    """Returns the rows of a task's table as dictionaries."""
    good, bad = list(reviews(folder, "pos", n // 2)), list(reviews(folder, "neg", n // 2))
    rows = []
    for text, rating in random.Random(2).sample(good + bad, n):
        there = {bare(w) for w in text.split()}
        themes = [t for t in sorted(THEMES) if there & set(THEMES[t].split())]
        if task.startswith("embed"):
            words = text.split()
            half = len(words) // 2
            rows.append({"text": " ".join(words[:half]), "text_pair": " ".join(words[half:])})
        elif task == "pairs":
            theme = sorted(THEMES)[len(rows) % len(THEMES)]
            rows.append({"text": theme, "text_pair": text, "label": ["no", "yes"][theme in themes]})
        elif task == "scores":
            rows.append({"text": text, "label": rating})
        elif task == "tags":
            words = text.split()[:MAX_TOKENS]
            rows.append({"tokens": words, "tags": [tag(w, b) for w, b in zip(words, ["."] + words)]})
        else:
            rows.append({"text": text, "label": themes})
    return rows


def encoded(task, rows, tokenizer, names):
    """Returns the inputs and labels of a batch, as transformers' models take them."""
    how = dict(truncation="longest_first", max_length=MAX_TOKENS, padding=True, return_tensors="pt")
    if task == "tags":
        x = tokenizer([r["tokens"] for r in rows], is_split_into_words=True, **how)
        labels = torch.full(x["input_ids"].shape, -100)
        for i, row in enumerate(rows):
            words = x.word_ids(i)
            for j, word in enumerate(words):
                if word is not None and word != words[j - 1]:
                    labels[i, j] = names.index(row["tags"][word])
        return x, labels
    pairs = [r["text_pair"] for r in rows] if task == "pairs" else None
    x = tokenizer([r["text"] for r in rows], pairs, **how)
    if task == "labels":
        return x, torch.tensor([[float(name in r["label"]) for name in names] for r in rows])
    if task == "scores":
        return x, torch.tensor([float(r["label"]) for r in rows])
    return x, torch.tensor([names.index(r["label"]) for r in rows])


def theirs(task, model, tokenizer, rows, names, steps):
    """Trains in PyTorch, and returns the losses."""
    plain = [p for n, p in model.named_parameters() if n.endswith(".bias") or "LayerNorm" in n]
    decayed = [p for n, p in model.named_parameters() if not (n.endswith(".bias") or "LayerNorm" in n)]
    optimizer = torch.optim.AdamW([{"params": decayed, "weight_decay": 0.01},
                                   {"params": plain, "weight_decay": 0.0}],
                                  lr=LR, betas=(0.9, 0.999), eps=1e-8)
    schedule = transformers.get_linear_schedule_with_warmup(optimizer, steps // 10, steps)
    losses = []
    if task.startswith("embed"):
        from sentence_transformers.losses import MultipleNegativesRankingLoss
        ranking = MultipleNegativesRankingLoss(model, scale=20)
    for s in range(steps):
        batch = rows[s * BATCH:(s + 1) * BATCH]
        if task.startswith("embed"):
            loss = ranking([model.preprocess([r[key] for r in batch]) for key in ("text", "text_pair")], None)
        else:
            x, labels = encoded(task, batch, tokenizer, names)
            loss = model(**x, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.grad is not None], 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    return losses


def embedder(config, tokenizer, folder):
    """Returns a model of sentence-transformers, and writes its folder."""
    from sentence_transformers import SentenceTransformer, models
    inner = os.path.join(folder, "inner")
    transformers.BertModel(config).save_pretrained(inner)
    tokenizer.save_pretrained(inner)
    encoder = models.Transformer(inner, max_seq_length=MAX_TOKENS)
    pooling = models.Pooling(config.hidden_size, pooling_mode="mean")
    model = SentenceTransformer(modules=[encoder, pooling], device="cpu")
    model.save(folder)
    return model.train()


def compare(task, folder, a):
    """Returns the losses of PyTorch and of tinytrain."""
    suffix, problem, names = HEADS[task]
    rows = rows_of(task, a.imdb, a.steps * BATCH)
    table = os.path.join(folder, "table.jsonl")
    with open(table, "w", encoding="utf-8") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    tokenizer = transformers.BertTokenizerFast(VOCABULARY, do_lower_case=True)
    config = transformers.BertConfig(
        vocab_size=len(tokenizer), hidden_size=128, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=512, max_position_embeddings=MAX_TOKENS, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0)
    if names:
        config.problem_type, config.id2label = problem, dict(enumerate(names))
        config.label2id = {n: k for k, n in enumerate(names)}
    torch.manual_seed(1)
    if task.startswith("embed"):
        model = embedder(config, tokenizer, folder)
    else:
        model = getattr(transformers, "BertFor" + suffix)(config).train()
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    command = [a.program, folder, table] + (["4"] if task.endswith("in 4 parts") else [])
    ours = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    return theirs(task, model, tokenizer, rows, names, a.steps), [float(x) for x in ours.split()]


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--imdb", metavar="DIR", required=True, help="folder aclImdb")
    p.add_argument("--only", choices=list(HEADS))
    p.add_argument("--steps", type=int, default=200)
    p.add_argument("--program", default="build/task_losses")
    p.add_argument("--tolerance", type=float, default=0.01)
    a = p.parse_args()
    if not os.access(a.program, os.X_OK):
        sys.exit(f"--program {a.program}: there is no such program; `make build/task_losses` builds one")
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    bad = []
    print("| task | first loss | mean of the last quarter, PyTorch | tinytrain | they differ by | "
          "a step's losses differ by at most |\n| --- | --- | --- | --- | --- | --- |")
    for task in [a.only] if a.only else HEADS:
        with tempfile.TemporaryDirectory() as folder:
            x, y = compare(task, folder, a)
        if len(x) != len(y):
            sys.exit(f"{task}: {len(y)} steps in tinytrain, {len(x)} in PyTorch")
        last = a.steps - a.steps // 4
        end, our_end = (sum(z[last:]) / len(z[last:]) for z in (x, y))
        step = max(range(len(x)), key=lambda s: abs(y[s] / x[s] - 1))
        largest, mean = abs(y[step] / x[step] - 1), abs(our_end / end - 1)
        print(f"| {task} | {x[0]:.6f} | {end:.6f} | {our_end:.6f} | {mean:.1e} | "
              f"{largest:.1e}, step {step + 1} |", flush=True)
        if not max(largest, mean) <= a.tolerance:
            bad.append(task)
    if bad:
        sys.exit("differs by more: " + ", ".join(bad))


if __name__ == "__main__":
    main()
