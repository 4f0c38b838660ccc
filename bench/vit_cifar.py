#!/usr/bin/env python3
"""PyTorch reference for a small vision transformer from scratch on CIFAR-10, with which tinytrain's runs are
compared.

needs: torch, transformers. CIFAR-10: the folder cifar-10-batches-bin of the binary version, with some or all
of the data_batch files.

    # 1. the starting point of both programs: random weights of a small ViT
    python bench/vit_cifar.py --make-start start/
    # 2. loss curve: images in the order of the files, neither cropped nor flipped. One side, then the other
    python bench/vit_cifar.py --losses 20 --start start/ --cifar cifar-10-batches-bin/
    build/vit_losses start/ cifar-10-batches-bin/ 20
    # 3. quality: shuffled, randomly cropped and flipped. Prints the test accuracy of the epoch that validates
    # best
    python bench/vit_cifar.py --start start/ --cifar cifar-10-batches-bin/
    build/vit_l16 --model start/ --data cifar-10-batches-bin/ --augment --epochs 20 --batch 32 --lr 1e-3 \\
        --out run

Training in both modes: fp32, mean cross-entropy, AdamW (betas 0.9 0.999, eps 1e-8, weight decay 0.01 except
on biases, LayerNorm weights and the class token), global gradient norm clipped to 1. At step s = 0, 1, ... of
S, with W = S // 10, the learning rate is --lr times
    s / W                                        while s < W
    (1 + cos(pi * (s - W) / (S - W))) / 2        after that
The model sees pixel / 127.5 - 1. In training without --losses, one image of eleven is held out for
validation, an equal share of each class. Each other image is padded by 4 zeros on all sides, cropped to a
random 32 x 32, and mirrored with probability 1/2.
"""
import argparse
import copy
import math
import os
import resource
import time

os.environ.setdefault("HF_HUB_OFFLINE", "1")
import torch
from transformers import ViTConfig, ViTForImageClassification

SIDE, PAD = 32, 4


def make_start(args):
    torch.manual_seed(args.seed)
    config = ViTConfig(image_size=SIDE, patch_size=args.patch, hidden_size=args.width,
                       num_hidden_layers=args.layers, num_attention_heads=args.heads,
                       intermediate_size=2 * args.width, num_labels=10, initializer_range=args.std)
    model = ViTForImageClassification(config)
    model.save_pretrained(args.make_start)
    print(f"wrote {args.make_start}: {sum(p.numel() for p in model.parameters())} parameters")


def images(folder, files):
    """Returns (n, 3, 32, 32) bytes and (n) labels of those `files` that exist."""
    data = b""
    for file in files:
        path = os.path.join(folder, file)
        if os.path.exists(path):
            with open(path, "rb") as f:
                data += f.read()
    if not data or len(data) % 3073:
        raise SystemExit(f"{folder} has none of {', '.join(files)}, or not whole records of 3073 bytes")
    records = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(-1, 3073)
    return records[:, 1:].reshape(-1, 3, SIDE, SIDE), records[:, 0].long()


def held_out(labels, n, g):
    """Holds out n images, an equal share of each class. Returns (held-out indices, other indices)."""
    place = torch.empty(len(labels))
    for c in labels.unique():
        of_class = (labels == c).nonzero()[:, 0]
        place[of_class] = (torch.randperm(len(of_class), generator=g) + 0.5) / len(of_class)
    order = place.argsort(stable=True)
    return order[:n], order[n:]


def cropped(pixels, g):
    """Returns each image shifted by up to PAD pixels in both directions, and randomly mirrored."""
    n = len(pixels)
    padded = torch.nn.functional.pad(pixels, (PAD,) * 4)
    y, x = (torch.randint(2 * PAD + 1, (n, 1), generator=g) + torch.arange(SIDE) for _ in "yx")
    x = torch.where(torch.rand(n, 1, generator=g) < 0.5, x.flip(1), x)
    return padded[torch.arange(n)[:, None, None], :, y[:, :, None], x[:, None, :]].permute(0, 3, 1, 2)


def logits(model, pixels):
    return model(pixel_values=pixels.float() / 127.5 - 1).logits


class Trainer:
    def __init__(self, model, args, steps):
        decayed = [p for n, p in model.named_parameters() if p.squeeze().ndim > 1]
        plain = [p for n, p in model.named_parameters() if p.squeeze().ndim <= 1]
        self.optimizer = torch.optim.AdamW([{"params": decayed, "weight_decay": 0.01},
                                            {"params": plain, "weight_decay": 0.0}],
                                           lr=args.lr, betas=(0.9, 0.999), eps=1e-8, fused=True)
        self.model, self.args, self.steps, self.step_number = model, args, steps, 0

    def lr(self):
        s, warmup = self.step_number, self.steps // 10
        return self.args.lr * (s / warmup if s < warmup
                               else 0.5 * (1 + math.cos(math.pi * (s - warmup) / (self.steps - warmup))))

    def step(self, pixels, labels):
        """Does one update on a batch. Returns (loss, gradient norm before clipping, number of correct
        predictions)."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.lr()
        out = logits(self.model, pixels)
        loss = torch.nn.functional.cross_entropy(out, labels)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.step_number += 1
        return loss.item(), norm.item(), (out.argmax(-1) == labels).sum().item()


def load_model(args):
    return ViTForImageClassification.from_pretrained(args.start, dtype=torch.float32,
                                                     attn_implementation="sdpa")


def losses(args, pixels, labels):
    if (args.losses - 1) * args.batch >= len(labels):
        raise SystemExit(f"{args.cifar} has images for {math.ceil(len(labels) / args.batch)} steps")
    trainer = Trainer(load_model(args).train(), args, args.losses)
    for s in range(args.losses):
        part = slice(s * args.batch, (s + 1) * args.batch)
        print("step %d: loss %.6f, gradient norm %.4f" % (s, *trainer.step(pixels[part], labels[part])[:2]),
              flush=True)


@torch.no_grad()
def accuracy(model, pixels, labels):
    model.eval()
    right = sum((logits(model, p).argmax(-1) == l).sum().item()
                for p, l in zip(pixels.split(100), labels.split(100)))
    model.train()
    return right / len(labels)


def train(args, pixels, labels):
    g = torch.Generator().manual_seed(args.seed)
    test = images(args.cifar, ["test_batch.bin"])
    validation, rest = held_out(labels, (len(labels) + 10) // 11, g)
    model = load_model(args).train()
    per_epoch = math.ceil(len(rest) / args.batch)
    trainer = Trainer(model, args, per_epoch * args.epochs)
    print(f"{len(rest)} images to train on, {len(validation)} for validation; {torch.get_num_threads()} "
          "threads")
    best, kept, seconds = -1, None, 0.0
    for epoch in range(args.epochs):
        began, total, right = time.perf_counter(), 0.0, 0
        for batch in rest[torch.randperm(len(rest), generator=g)].split(args.batch):
            loss, _, hits = trainer.step(cropped(pixels[batch], g), labels[batch])
            total, right = total + loss * len(batch), right + hits
        spent = time.perf_counter() - began
        seconds += spent
        score = accuracy(model, pixels[validation], labels[validation])
        if score > best:
            best, kept = score, copy.deepcopy(model.state_dict())
        print(f"epoch {epoch + 1}: loss {total / len(rest):.4f}, accuracy {right / len(rest):.4f}; "
              f"validation {score:.4f}; "
              f"{spent:.0f} s, {len(rest) / spent:.0f} images/s", flush=True)
    model.load_state_dict(kept)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024      # ru_maxrss is in KiB on Linux
    print(f"best epoch: accuracy {accuracy(model, *test):.4f} on {len(test[1])} test images; "
          f"trained for {seconds:.0f} s, peak resident memory {peak:.0f} MiB")


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--make-start", metavar="DIR", help="write the starting folder and stop; its model:")
    p.add_argument("--width", type=int, default=128)
    p.add_argument("--layers", type=int, default=4)
    p.add_argument("--heads", type=int, default=4)
    p.add_argument("--patch", type=int, default=4)
    p.add_argument("--std", type=float, default=0.06, help="of its random weights")
    p.add_argument("--losses", type=int, metavar="STEPS", help="losses of so many steps, and no more")
    p.add_argument("--epochs", type=int, default=20)
    p.add_argument("--batch", type=int, default=32)
    p.add_argument("--lr", type=float, default=1e-3)
    p.add_argument("--seed", type=int, default=1, help="of --make-start, or of split, order, crops and flips")
    p.add_argument("--start", metavar="DIR", help="folder made by --make-start")
    p.add_argument("--cifar", metavar="DIR", help="folder cifar-10-batches-bin")
    p.add_argument("--threads", type=int, default=os.cpu_count())
    args = p.parse_args()
    torch.set_num_threads(args.threads)
    if args.make_start:
        return make_start(args)
    if not (args.start and args.cifar):
        p.error("give --start and --cifar, or --make-start")
    data = images(args.cifar, [f"data_batch_{k}.bin" for k in range(1, 6)])
    (losses if args.losses else train)(args, *data)


if __name__ == "__main__":
    main()
