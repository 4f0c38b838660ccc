"""Fine-tunes a tiny random LLaMA on synthetic conversations with SFTTrainer and DPOTrainer of trl and with tinytrain,
on the same batches, and compares the losses of each step:

    python bench/chat_trl.py build/chat_losses [--steps 100] [--folder FOLDER]

Needs PyTorch, transformers and trl from PyPI. SFTTrainer has three runs: messages with assistant_only_loss and the
template tests/golden/chats/chatml.jinja; prompts with completions; and messages that are cut. DPOTrainer has four, in
the forms of its data: strings, messages, messages without a prompt of their own, and messages that are cut. The
program prints the largest relative difference of a loss in each run, and of pairs the mean margin and accuracy of a
step."""
import argparse
import json
import os
import random
import shutil
import subprocess
import tempfile

import torch
from datasets import load_dataset
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

golden = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "tests", "golden")
BATCH = 8


def conversations(rng, n, kind):
    names = ("Ann", "Bo", "Cy", "Di", "Eve")
    things = ("a film", "a cat", "tea", "12 eggs", "the sea", "größe", "中文")
    for _ in range(n):
        a, b, name, thing = rng.randrange(50), rng.randrange(50), rng.choice(names), rng.choice(things)
        turns = [(f"{name} asks: what is {a} + {b}?", f"The sum is {a + b}."),
                 (f"Repeat after me: {thing}", f"You said: {thing}."),
                 (f"Who likes {thing}?", f"{name} likes {thing}, and nobody else."), ("Bye!", f"Goodbye, {name}.")]
        rng.shuffle(turns)
        if kind == "completions":
            yield {"prompt": turns[0][0] + "\n", "completion": turns[0][1]}
            continue
        if kind == "strings":
            yield {"prompt": turns[0][0] + "\n", "chosen": turns[0][1], "rejected": turns[1][1] + " No."}
            continue
        messages = [{"role": "system", "content": f"You talk to {name}."}] if rng.random() < 0.5 else []
        if kind in ("lists", "implicit"):
            prompt = messages + [{"role": "user", "content": turns[0][0]}]
            answers = [[{"role": "assistant", "content": text}] for text in (turns[0][1], turns[1][1] + " No.")]
            if kind == "implicit":
                yield {"chosen": prompt + answers[0], "rejected": prompt + answers[1]}
            else:
                yield {"prompt": prompt, "chosen": answers[0], "rejected": answers[1]}
            continue
        for user, answer in turns[:rng.randrange(1, 4)]:
            messages += [{"role": "user", "content": user}, {"role": "assistant", "content": answer}]
        yield {"messages": messages}


class InOrder:
    losses = None

    def _get_train_sampler(self, *args, **kwargs):
        return torch.utils.data.SequentialSampler(self.train_dataset)

    def compute_loss(self, *args, **kwargs):
        found = super().compute_loss(*args, **kwargs)
        self.losses.append(float((found[0] if isinstance(found, tuple) else found).detach()))
        return found


class InOrderSFT(InOrder, SFTTrainer):
    pass


class InOrderDPO(InOrder, DPOTrainer):
    pass


def losses_of_trl(model, tokenizer, data, steps, length, kind, folder):
    pairs = kind in ("strings", "lists", "implicit")
    own = {"beta": 0.1} if pairs else {"assistant_only_loss": kind == "messages"}
    options = (DPOConfig if pairs else SFTConfig)(
        output_dir=os.path.join(folder, "trl"), per_device_train_batch_size=BATCH, max_steps=steps, learning_rate=1e-4 if pairs else 1e-3,
        weight_decay=0.01, max_grad_norm=1.0, lr_scheduler_type="linear", warmup_steps=0, max_length=length, **own,
        report_to="none", save_strategy="no", logging_strategy="no", use_cpu=True,
        bf16=False, disable_tqdm=True, gradient_checkpointing=False)
    trainer = (InOrderDPO if pairs else InOrderSFT)(model, args=options, train_dataset=load_dataset("json", data_files=data, split="train"),
                      processing_class=tokenizer)
    trainer.losses = []
    trainer.train()
    logged = trainer.state.log_history[-1]
    return trainer.losses, [logged.get("rewards/margins"), logged.get("rewards/accuracies")]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("program")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--folder", default=None)
    parser.add_argument("--only", nargs="*", help="kinds of data: messages completions strings lists implicit")
    args = parser.parse_args()
    torch.set_num_threads(2)
    folder = args.folder or tempfile.mkdtemp()
    start = os.path.join(folder, "model")
    os.makedirs(start, exist_ok=True)
    shutil.copy(os.path.join(golden, "bpe", "qwen2", "tokenizer.json"), start)
    shutil.copy(os.path.join(golden, "chats", "chatml.jinja"), os.path.join(start, "chat_template.jinja"))
    with open(os.path.join(start, "tokenizer_config.json"), "w") as f:
        json.dump({"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>",
                   "tokenizer_class": "PreTrainedTokenizerFast"}, f)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(start)
    torch.manual_seed(3)
    config = LlamaConfig(vocab_size=512, hidden_size=64, intermediate_size=160, num_hidden_layers=2,
                         num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512,
                         eos_token_id=tokenizer.eos_token_id, bos_token_id=None, pad_token_id=None)
    LlamaForCausalLM(config).save_pretrained(start)
    runs = (("messages", "messages", 512), ("completions", "completions", 512), ("cut", "messages", 60),
            ("strings", "strings", 512), ("lists", "lists", 512), ("implicit", "implicit", 512),
            ("pairs that are cut", "lists", 40))
    for name, kind, length in runs:
        if args.only and kind not in args.only:
            continue
        data = os.path.join(folder, name.replace(" ", "_") + ".jsonl")
        with open(data, "w", encoding="utf-8") as f:
            f.writelines(json.dumps(c, ensure_ascii=False) + "\n" for c in conversations(random.Random(5), 500, kind))
        model = LlamaForCausalLM.from_pretrained(start, dtype=torch.float32)
        theirs, means = losses_of_trl(model, tokenizer, data, args.steps, length, kind, folder)
        command = (args.program, start, data, str(args.steps), str(BATCH), str(length))
        found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        worst = max(abs(a - b) / b for a, b in zip(found["losses"], theirs, strict=True))
        own = found["losses"]
        print(f"{name}: {len(own)} steps, loss {theirs[0]:.4f} to {theirs[-1]:.4f} (trl), {own[0]:.4f} to "
              f"{own[-1]:.4f} (tinytrain); largest difference {100 * worst:.4f}%", flush=True)
        if "pairs" in found:
            print("  mean margin {:.4f} and accuracy {:.4f} (trl), {:.4f} and {:.4f} (tinytrain)".format(
                *means, *found["pairs"]), flush=True)


if __name__ == "__main__":
    main()
