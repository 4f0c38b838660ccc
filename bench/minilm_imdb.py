#!/usr/bin/env python3
"""PyTorch reference for fine-tuning MiniLM on IMDb reviews, with which tinytrain's runs are compared.

needs: torch, transformers, safetensors. IMDb: the original aclImdb_v1 archive, unpacked. MiniLM: a Hugging
Face folder with config.json, model.safetensors and vocab.txt, for example
sentence-transformers/all-MiniLM-L6-v2.

    # 1. the starting point of both programs: the MiniLM body with a seeded classifier of two labels
    python bench/minilm_imdb.py --make-start start/ --minilm all-MiniLM-L6-v2/
    # or without a checkpoint: a vocabulary of IMDb's words, and a DistilBERT with seeded random weights
    python bench/minilm_imdb.py --make-vocab vocab/ --imdb aclImdb/
    python bench/minilm_imdb.py --make-start start/ --vocab vocab/
    # 2. loss curve: no dropout, fixed batches, float32. Writes the batches for tinytrain, and the losses
    python bench/minilm_imdb.py --losses 50 --start start/ --imdb aclImdb/ --batches batches.safetensors \\
        --out losses.json
    # 3. quality and speed: dropout as in config.json, length-grouped batches. Prints test accuracy and
    # wall time; --precision bf16-mixed with autocast to bf16, --device cuda on a GPU
    python bench/minilm_imdb.py --train 4000 --test 2000 --epochs 2 --batch 16 --start start/ --imdb aclImdb/

Training in both modes: mean cross-entropy, AdamW (betas 0.9 0.999, eps 1e-8, weight decay 0.01 except on
biases and LayerNorm weights), global gradient norm clipped to 1. At step s = 0, 1, ... of S, with W = S //
10, the learning rate is --lr times
    s / W                  while s < W (as transformers' get_linear_schedule_with_warmup)
    (S - s) / (S - W)      after that, with --schedule linear;   1 with --schedule constant
Reviews are cut to 512 tokens, [CLS] and [SEP] included. A label is 1 for pos, 0 for neg.

To choose N reviews of a split, random.Random(seed) shuffles the sorted file names of pos, of which the first
N/2 are taken; neg likewise, with a fresh random.Random(seed). --losses then shuffles these N = 16 * steps
reviews by random.Random(seed) and cuts them into batches of 16. batches.safetensors holds int32 tensors
batchB.input_ids (all sequences one after another, no padding), batchB.seq_start (sequences + 1) and
batchB.labels.
"""
import argparse
import json
import math
import os
import random
import resource
import shutil
import time

os.environ.setdefault("HF_HUB_OFFLINE", "1")
import torch
from safetensors.torch import load_file, save_file
from transformers import (AutoModelForSequenceClassification, BertForSequenceClassification, BertTokenizer,
                          DistilBertConfig, DistilBertForSequenceClassification)

MAX_TOKENS = 512


def make_vocab(args):
    """Writes a vocabulary of 30,522 pieces, the size of bert-base-uncased's, from the words of the train
    split."""
    from tokenizers import BertWordPieceTokenizer
    tokenizer = BertWordPieceTokenizer(lowercase=True)
    tokenizer.train_from_iterator([text for text, _ in reviews(args.imdb, "train", 25000, args.seed)],
                                  vocab_size=30522, show_progress=False)
    os.makedirs(args.make_vocab, exist_ok=True)
    tokenizer.save_model(args.make_vocab)
    print("wrote", os.path.join(args.make_vocab, "vocab.txt"))


def make_start(args):
    """Writes BertForSequenceClassification with MiniLM's body; classifier weights normal(0, 0.02), bias 0.
    With --vocab, writes a DistilBERT with all weights as transformers draws them."""
    if args.vocab:
        torch.manual_seed(args.seed)
        DistilBertForSequenceClassification(DistilBertConfig(num_labels=2)).save_pretrained(args.make_start)
        shutil.copyfile(os.path.join(args.vocab, "vocab.txt"), os.path.join(args.make_start, "vocab.txt"))
        print("wrote", args.make_start)
        return
    model = BertForSequenceClassification.from_pretrained(args.minilm, num_labels=2, dtype=torch.float32)
    g = torch.Generator().manual_seed(args.seed)
    with torch.no_grad():
        model.classifier.weight.normal_(0, 0.02, generator=g)
        model.classifier.bias.zero_()
    model.save_pretrained(args.make_start)
    for file in ("vocab.txt", "tokenizer_config.json"):
        if os.path.exists(os.path.join(args.minilm, file)):
            shutil.copyfile(os.path.join(args.minilm, file), os.path.join(args.make_start, file))
    print("wrote", args.make_start)


def reviews(folder, split, count, seed):
    """Returns `count` reviews of a split, half of them positive: a list of (text, label), positive ones
    first."""
    out = []
    for name, label in (("pos", 1), ("neg", 0)):
        files = sorted(os.listdir(os.path.join(folder, split, name)))
        random.Random(seed).shuffle(files)
        for file in files[:count // 2]:
            with open(os.path.join(folder, split, name, file), encoding="utf-8", newline="") as f:
                out.append((f.read(), label))
    if len(out) != count:
        raise SystemExit(f"{folder}/{split} gives {len(out)} reviews; {count} were asked for (an even "
                         "number, "
                         "at most 25000)")
    return out


def encode(tokenizer, rows):
    """Returns a list of (ids, label)."""
    ids = tokenizer([text for text, _ in rows], truncation=True, max_length=MAX_TOKENS)["input_ids"]
    return [(x, label) for x, (_, label) in zip(ids, rows)]


def padded(rows, device):
    """Returns ids, mask and labels of a batch. The copies to a GPU may still be in flight."""
    longest = max(len(ids) for ids, _ in rows)
    ids = torch.tensor([x + [0] * (longest - len(x)) for x, _ in rows])
    lengths = torch.tensor([len(x) for x, _ in rows])
    mask = (torch.arange(longest) < lengths[:, None]).long()
    tensors = ids, mask, torch.tensor([label for _, label in rows])
    if device == "cpu":
        return tensors
    return tuple(t.pin_memory().to(device, non_blocking=True) for t in tensors)


def autocast(args):
    return torch.autocast(args.device, torch.bfloat16, enabled=args.precision == "bf16-mixed")


def load_model(args, dropout):
    off = ({} if dropout
           else dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, classifier_dropout=0.0))
    model = AutoModelForSequenceClassification.from_pretrained(
        args.start, num_labels=2, dtype=torch.float32, attn_implementation="sdpa", **off)
    return model.to(args.device)


class Trainer:
    def __init__(self, model, args, steps):
        plain = [p for n, p in model.named_parameters() if n.endswith(".bias") or "LayerNorm" in n]
        decayed = [p for n, p in model.named_parameters() if not (n.endswith(".bias") or "LayerNorm" in n)]
        self.optimizer = torch.optim.AdamW([{"params": decayed, "weight_decay": 0.01},
                                            {"params": plain, "weight_decay": 0.0}],
                                           lr=args.lr, betas=(0.9, 0.999), eps=1e-8, fused=True)
        self.model, self.args, self.steps, self.step_number = model, args, steps, 0

    def lr(self):
        s, warmup = self.step_number, self.steps // 10
        if s < warmup:
            return self.args.lr * s / warmup
        return self.args.lr * ((self.steps - s) / (self.steps - warmup) if self.args.schedule == "linear"
                               else 1.0)

    def step(self, rows):
        """Does one update on a batch, without waiting for the GPU. Returns (loss, gradient norm before
        clipping, learning rate), the first two as tensors."""
        lr = self.lr()
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        ids, mask, labels = padded(rows, self.args.device)
        with autocast(self.args):
            logits = self.model(input_ids=ids, attention_mask=mask).logits
            loss = torch.nn.functional.cross_entropy(logits, labels)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.step_number += 1
        return loss.detach(), norm, lr


def losses(args, tokenizer):
    rows = encode(tokenizer, reviews(args.imdb, "train", args.losses * args.batch, args.seed))
    random.Random(args.seed).shuffle(rows)
    tensors = {}
    for b in range(args.losses):
        batch = rows[b * args.batch:(b + 1) * args.batch]
        start = [0]
        for ids, _ in batch:
            start.append(start[-1] + len(ids))
        tensors[f"batch{b}.input_ids"] = torch.tensor([i for ids, _ in batch for i in ids], dtype=torch.int32)
        tensors[f"batch{b}.seq_start"] = torch.tensor(start, dtype=torch.int32)
        tensors[f"batch{b}.labels"] = torch.tensor([label for _, label in batch], dtype=torch.int32)
    save_file(tensors, args.batches)

    tensors = load_file(args.batches)
    trainer = Trainer(load_model(args, dropout=False).train(), args, args.total_steps or args.losses)
    out = {"losses": [], "grad_norms": [], "lrs": [], "seconds": []}
    for b in range(args.losses):
        ids, start = tensors[f"batch{b}.input_ids"].tolist(), tensors[f"batch{b}.seq_start"].tolist()
        batch = [(ids[i:j], label)
                 for i, j, label in zip(start, start[1:], tensors[f"batch{b}.labels"].tolist())]
        began = time.perf_counter()
        loss, norm, lr = trainer.step(batch)
        loss, norm = loss.item(), norm.item()
        for key, value in zip(out, (loss, norm, lr, round(time.perf_counter() - began, 3))):
            out[key].append(value)
        print(f"step {b}: loss {loss:.6f}, gradient norm {norm:.4f}, "
              f"lr {lr:.3e}, {len(ids)} tokens, {out['seconds'][-1]:.2f} s", flush=True)
    with open(args.out, "w") as f:
        json.dump({**out, "torch": torch.__version__, "lr": args.lr, "schedule": args.schedule,
                   "seed": args.seed}, f, indent=1)
        f.write("\n")
    print("wrote", args.batches, "and", args.out)


def length_grouped(rows, batch, rng):
    """Shuffles the rows, sorts them by length within groups of 50 batches, cuts them into batches, and
    shuffles the batches."""
    rows = rows[:]
    rng.shuffle(rows)
    group = 50 * batch
    rows = [r for i in range(0, len(rows), group) for r in sorted(rows[i:i + group], key=lambda r: len(r[0]))]
    batches = [rows[i:i + batch] for i in range(0, len(rows), batch)]
    rng.shuffle(batches)
    return batches


@torch.no_grad()
def accuracy(model, rows, args):
    model.eval()
    rows, right = sorted(rows, key=lambda r: len(r[0])), 0
    for i in range(0, len(rows), 32):
        ids, mask, labels = padded(rows[i:i + 32], args.device)
        with autocast(args):
            right += (model(input_ids=ids, attention_mask=mask).logits.argmax(-1) == labels).sum()
    model.train()
    return right.item() / len(rows)


def train(args, tokenizer):
    torch.manual_seed(args.seed)
    rng = random.Random(args.seed)
    began = time.perf_counter()
    train_rows = encode(tokenizer, reviews(args.imdb, "train", args.train, args.seed))
    test_rows = encode(tokenizer, reviews(args.imdb, "test", args.test, args.seed))
    tokens = sum(len(ids) for ids, _ in train_rows)
    print(f"{len(train_rows)} train reviews ({tokens} tokens), {len(test_rows)} test reviews, "
          f"read in {time.perf_counter() - began:.1f} s")
    model = load_model(args, dropout=True).train()
    per_epoch = math.ceil(len(train_rows) / args.batch)
    trainer = Trainer(model, args, per_epoch * args.epochs)
    seconds = 0.0
    on_gpu = args.device != "cpu"
    for epoch in range(args.epochs):
        began, total = time.perf_counter(), 0.0
        for i, batch in enumerate(length_grouped(train_rows, args.batch, rng)):
            total += trainer.step(batch)[0]
            if (i + 1) % (200 if on_gpu else 25) == 0:
                spent = time.perf_counter() - began
                print(f"  epoch {epoch + 1} step {i + 1}/{per_epoch}: "
                      f"mean loss {total / (i + 1):.4f}, {spent:.0f} s", flush=True)
        total = float(total)      # float() waits for the GPU
        spent = time.perf_counter() - began
        seconds += spent
        if args.test_once and epoch + 1 < args.epochs:
            print(f"epoch {epoch + 1}: train loss {total / per_epoch:.4f}; trained {spent:.1f} s "
                  f"({tokens / spent:.0f} tokens/s)", flush=True)
            continue
        began = time.perf_counter()
        score = accuracy(model, test_rows, args)
        print(f"epoch {epoch + 1}: train loss {total / per_epoch:.4f}, test accuracy {score:.4f}; "
              f"trained {spent:.1f} s ({tokens / spent:.0f} tokens/s), "
              f"tested {time.perf_counter() - began:.1f} s", flush=True)
    if on_gpu:
        print(f"memory of tensors at most {torch.cuda.max_memory_allocated() / 1e6:.0f} MB")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024      # ru_maxrss is in KiB on Linux
    print(f"training took {seconds:.1f} s with {torch.get_num_threads()} threads on {args.device}; "
          f"peak resident memory {peak:.0f} MiB")


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--make-start", metavar="DIR", help="write the starting folder and stop")
    p.add_argument("--minilm", metavar="DIR", help="where MiniLM is, for --make-start")
    p.add_argument("--vocab", metavar="DIR", help="of --make-start: DistilBERT with random weights and this "
                   "folder's vocab.txt")
    p.add_argument("--make-vocab", metavar="DIR", help="write vocab.txt, from --imdb, and stop; needs "
                   "tokenizers")
    p.add_argument("--losses", type=int, metavar="STEPS",
                   help="fixed batches without dropout; writes --batches and --out")
    p.add_argument("--total-steps", type=int, metavar="S",
                   help="length of the schedule, when longer than --losses runs")
    p.add_argument("--train", type=int, metavar="N", help="train on N reviews")
    p.add_argument("--test", type=int, default=2000, metavar="N")
    p.add_argument("--test-once", action="store_true", help="after the last epoch, and not after each")
    p.add_argument("--epochs", type=int, default=2)
    p.add_argument("--batch", type=int, default=16)
    p.add_argument("--lr", type=float, default=5e-5)
    p.add_argument("--schedule", choices=("linear", "constant"), default="linear")
    p.add_argument("--precision", choices=("32-true", "bf16-mixed"), default="32-true")
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--start", metavar="DIR", help="folder made by --make-start")
    p.add_argument("--imdb", metavar="DIR", help="folder aclImdb")
    p.add_argument("--batches", default="batches.safetensors", metavar="FILE")
    p.add_argument("--out", default="losses.json", metavar="FILE")
    p.add_argument("--threads", type=int, default=os.cpu_count())
    p.add_argument("--device", default="cpu")
    args = p.parse_args()
    torch.set_num_threads(args.threads)
    if args.make_vocab:
        return make_vocab(args) if args.imdb else p.error("--make-vocab needs --imdb")
    if args.make_start:
        if not (args.minilm or args.vocab):
            p.error("--make-start needs --minilm or --vocab")
        return make_start(args)
    if not (args.start and args.imdb and (args.losses or args.train)):
        p.error("give --losses or --train, with --start and --imdb; or --make-start")
    tokenizer = BertTokenizer.from_pretrained(args.start)
    if args.losses:
        losses(args, tokenizer)
    if args.train:
        train(args, tokenizer)


if __name__ == "__main__":
    main()
