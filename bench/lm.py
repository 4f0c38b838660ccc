#!/usr/bin/env python3
"""Compares tinytrain with PyTorch and llama.cpp on this machine: GPT-2 of 124 million parameters with the
same random weights, the same tokens and the same number of threads, in turn.

    python bench/lm.py train                  training steps on 4 x 256 tokens, losses and memory
    python bench/lm.py losses                 the losses of 50 steps, which other load cannot change
    python bench/lm.py generate               one sequence: tokens a second after a prompt
    python bench/lm.py generate --llama f16   ... and llama.cpp with the same weights in f16 or f32
    python bench/lm.py few-bits --llama-cpp BIN   LLaMA of 271 million parameters in 8 and 4 bits: tokens a
                                              second of tinytrain and of llama.cpp's q8_0 and q4_0
    python bench/lm.py qlora                  the losses of 20 steps of adapters on a base in NF4, beside peft
                                              and bitsandbytes

The C side is build/lm (bench/lm.c; `make bench-programs`). Training on both sides: mean cross-entropy of the
next token, AdamW (PyTorch: fused) 1e-4, decay 0.01 except on biases and norms, no clipping, no dropout;
PyTorch attends by scaled_dot_product_attention. Programs run one step each in turn, after one step that is
not counted; each program is its own process. Precisions are paired as in pytorch.py. transformers generates
with its cache, without sampling. llama.cpp is that of the package gpt4all; for few-bits it is BIN, a folder
with llama-bench and llama-quantize of a build. There the weight of the last layer, which llama.cpp stores in
q8_0 or q6_K, has 8 bits here.

needs: torch, transformers, numpy; for --llama gguf and gpt4all; for few-bits gguf; for qlora peft and
bitsandbytes."""
import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

from pytorch import (PAIRS, Report, Turns, in_turn, output_of, peak_resident, positive, program, rows_of,
                     threads)

HERE = os.path.abspath(__file__)


def make(folder, args):
    """Writes GPT-2 with random weights, and tokens for each step."""
    import numpy as np
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel
    torch.manual_seed(1)
    config = GPT2Config(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    config.n_layer = args.layers or config.n_layer
    GPT2LMHeadModel(config).save_pretrained(folder)
    count = args.steps_at_most * args.seqs * args.length + 1
    ids = np.random.RandomState(1).zipf(1.3, count) % config.vocab_size
    ids.astype(np.uint16).tofile(os.path.join(folder, "ids.bin"))


def turns(args):
    """Runs a step for each line of standard input, as build/lm --turns does."""
    torch = threads(args.threads)
    import numpy as np
    from transformers import GPT2LMHeadModel
    model = GPT2LMHeadModel.from_pretrained(args.folder, attn_implementation="sdpa").train()
    model = model.to(torch.bfloat16 if args.variant == "bf16 weights" else torch.float32)
    groups = [{"params": [p for p in model.parameters() if p.ndim >= 2], "weight_decay": 0.01},
              {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-4, fused=True)
    ids = torch.from_numpy(np.fromfile(os.path.join(args.folder, "ids.bin"), np.uint16).astype(np.int64))
    tokens, k = args.seqs * args.length, 0
    for _ in sys.stdin:
        x, y = (ids[k * tokens + n:(k + 1) * tokens + n].view(args.seqs, args.length) for n in (0, 1))
        k = (k + 1) % args.steps_at_most
        began = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        mixed = args.variant == "bf16 autocast"
        with torch.autocast("cpu", torch.bfloat16) if mixed else contextlib.nullcontext():
            logits = model(input_ids=x).logits
            loss = torch.nn.functional.cross_entropy(logits.view(tokens, -1), y.reshape(tokens))
        loss.backward()
        optimizer.step()
        loss = loss.item()
        print(json.dumps({"name": "step", "value": time.perf_counter() - began, "unit": "s", "loss": loss}),
              flush=True)
    print(json.dumps({"name": "peak resident memory", "value": peak_resident() / 1e6, "unit": "MB"}))


class Steps(Turns):
    """A Turns object that also keeps the losses."""

    def __init__(self, label, command):
        super().__init__(label, command)
        self.losses, read = [], self.process.stdout

        def lines():
            for line in read:
                if '"loss"' in line:
                    self.losses.append(json.loads(line)["loss"])
                yield line
        self.lines = lines()

    def turn(self, count=True):
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        for line in self.lines:
            row = json.loads(line) if line.startswith("{") else {}
            if row.get("name") == "step":
                if count:
                    self.seconds.append(row["value"])
                return
        sys.exit(f"lm.py: {self.label} ended with status {self.process.wait()}")

    def finish(self):
        self.process.stdin.close()
        self.rows = rows_of("".join(self.lines))
        if self.process.wait() != 0:
            sys.exit(f"lm.py: {self.label} ended with status {self.process.returncode}")


def sides(args, folder, precision):
    """Starts tinytrain's steps and PyTorch's."""
    sizes = ["--seqs", str(args.seqs), "--length", str(args.length), "--threads", str(args.threads)]
    return (Steps(f"tinytrain {precision}",
                  [program(args, "lm"), "--json", "--turns", "--model", folder, "--data",
                   os.path.join(folder, "ids.bin"), "--precision", precision] + sizes),
            Steps(f"PyTorch {PAIRS[precision]}",
                  [sys.executable, HERE, "turns", "--variant", PAIRS[precision], "--folder", folder,
                   "--steps-at-most", str(args.steps_at_most)] + sizes))


def largest_difference(ours, theirs):
    apart = [abs(x - y) / y for x, y in zip(ours.losses, theirs.losses)]
    return float("nan") if any(x != x for x in apart) else max(apart)


def losses(args, report):
    with tempfile.TemporaryDirectory() as folder:
        make(folder, args)
        for precision in args.precisions:
            both = sides(args, folder, precision)
            name = f"GPT-2, {args.seqs} x {args.length}, {precision}"
            for step in range(1, args.rounds + 1):
                for side in both:
                    side.turn()
                if step % 10 == 0 or step == args.rounds:
                    report.say(f"{name}: {step} steps, loss {both[0].losses[0]:.4f} to "
                               f"{both[0].losses[-1]:.4f}, largest difference "
                               f"{largest_difference(*both):.2g}")
            for side in both:
                side.finish()
            report.row(f"{name}, largest difference of {args.rounds} losses", largest_difference(*both),
                       "relative")


def train(args, report):
    with tempfile.TemporaryDirectory() as folder:
        make(folder, args)
        tokens = args.seqs * args.length
        for precision in args.precisions:
            ours, theirs = sides(args, folder, precision)
            in_turn([ours, theirs], args.rounds)
            a, b = (tokens / statistics.median(p.seconds) for p in (ours, theirs))
            apart = largest_difference(ours, theirs)
            name = f"GPT-2, {args.seqs} x {args.length}, {precision}"
            report.say(f"{name}: {len(ours.losses)} steps, loss {ours.losses[0]:.4f} to "
                       f"{ours.losses[-1]:.4f}")
            report.row(f"{name}, PyTorch {PAIRS[precision]}", a, "tokens/s", b)
            report.row(f"{name}, PyTorch {PAIRS[precision]}, memory", ours.memory(), "MB", theirs.memory())
            report.row(f"{name}, planned memory", ours.rows["planned memory"]["value"], "MB")
            report.row(f"{name}, largest difference of a loss", apart, "relative")


def theirs_generates(args, folder):
    """Returns how many tokens a second transformers generates after the first token: the best of two runs."""
    torch = threads(args.threads)
    import numpy as np
    from transformers import GPT2LMHeadModel
    dtype = torch.bfloat16 if args.precision == "bf16-true" else torch.float32
    model = GPT2LMHeadModel.from_pretrained(folder, attn_implementation="sdpa", dtype=dtype).eval()
    ids = np.fromfile(os.path.join(folder, "ids.bin"), np.uint16)[:args.prompt].astype(np.int64)
    prompt = torch.from_numpy(ids)[None]

    def seconds(tokens):
        began = time.perf_counter()
        out = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=tokens,
                             min_new_tokens=tokens, do_sample=False, pad_token_id=0)
        assert out.shape[1] == args.prompt + tokens
        return time.perf_counter() - began
    with torch.no_grad():
        seconds(2)
        return max((args.tokens - 1) / (seconds(args.tokens) - seconds(1)) for _ in range(2))


def write_gguf(folder, path, dtype):
    """Writes the weights in llama.cpp's format, with a made-up vocabulary."""
    import gguf
    import numpy as np
    from transformers import GPT2LMHeadModel
    model = GPT2LMHeadModel.from_pretrained(folder)
    c = model.config
    w = gguf.GGUFWriter(path, "gpt2")
    w.add_name("random")
    w.add_block_count(c.n_layer)
    w.add_context_length(c.n_positions)
    w.add_embedding_length(c.n_embd)
    w.add_feed_forward_length(4 * c.n_embd)
    w.add_head_count(c.n_head)
    w.add_layer_norm_eps(c.layer_norm_epsilon)
    w.add_file_type(gguf.LlamaFileType.MOSTLY_F16 if dtype == "f16" else gguf.LlamaFileType.ALL_F32)
    w.add_tokenizer_model("gpt2")
    w.add_tokenizer_pre("gpt-2")
    # the bytes that GPT-2's vocabulary writes as the character of the same code
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = [b for b in range(256) if b not in printable]
    characters = [chr(b if b in printable else 256 + others.index(b)) for b in range(256)]
    w.add_token_list(characters + [f"w{k}" for k in range(256, c.vocab_size)])
    w.add_token_types([gguf.TokenType.NORMAL] * c.vocab_size)
    w.add_token_merges(["! !"])
    w.add_eos_token_id(c.vocab_size - 1)
    w.add_bos_token_id(c.vocab_size - 1)
    names = {"ln_1": "attn_norm", "attn.c_attn": "attn_qkv", "attn.c_proj": "attn_output", "ln_2": "ffn_norm",
             "mlp.c_fc": "ffn_up", "mlp.c_proj": "ffn_down"}
    for name, x in model.transformer.state_dict().items():
        x = x.numpy()
        if name.startswith("h."):
            layer, rest = name.split(".", 2)[1:]
            module, kind = rest.rsplit(".", 1)
            to = f"blk.{layer}.{names[module]}.{kind}"
            x = x.T if x.ndim == 2 else x
        else:
            to = {"wte.weight": "token_embd.weight", "wpe.weight": "position_embd.weight",
                  "ln_f.weight": "output_norm.weight", "ln_f.bias": "output_norm.bias"}[name]
        half = dtype == "f16" and x.ndim == 2 and to != "position_embd.weight"
        w.add_tensor(to, np.ascontiguousarray(x.astype(np.float16 if half else np.float32)))
        if name == "wte.weight":
            w.add_tensor("output.weight", np.ascontiguousarray(x.astype(np.float16 if half else np.float32)))
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


def llama_generates(args, path):
    """Returns how many tokens a second llama.cpp generates after the first token: the best of two runs."""
    from gpt4all import GPT4All
    model = GPT4All(os.path.basename(path), model_path=os.path.dirname(path), allow_download=False,
                    device="cpu", n_ctx=args.prompt + args.tokens + 32, n_threads=args.threads, verbose=False)

    def speed():
        times = []

        def heard(_token, _text):
            times.append(time.perf_counter())
            return True
        model.generate("!" * args.prompt, max_tokens=args.tokens, temp=0, n_batch=64, callback=heard)
        return (len(times) - 1) / (times[-1] - times[0])
    speed()
    return max(speed() for _ in range(2))


def generate(args, report):
    with tempfile.TemporaryDirectory() as folder:
        make(folder, args)
        command = [program(args, "lm"), "--json", "--model", folder,
                   "--data", os.path.join(folder, "ids.bin"), "--generate", str(args.tokens),
                   "--prompt", str(args.prompt), "--threads", str(args.threads),
                   "--precision", args.precision]
        ours, theirs, llama = 0, 0, 0
        path = os.path.join(folder, "model.gguf")
        if args.llama:
            write_gguf(folder, path, args.llama)
        for _ in range(args.rounds):        # the programs run in turn, and each keeps its best round
            ours = max(ours, rows_of(output_of(command))["tokens a second, after the first"]["value"])
            theirs = max(theirs, theirs_generates(args, folder))
            llama = max(llama, llama_generates(args, path)) if args.llama else 0
        name = f"GPT-2, {args.tokens} tokens behind {args.prompt}, {args.precision}"
        report.row(f"{name}, transformers", ours, "tokens/s", theirs)
        if args.llama:
            report.row(f"{name}, llama.cpp {args.llama}", ours, "tokens/s", llama, who="llama.cpp")


def make_llama(folder, args, config):
    """Writes a LLaMA with random weights, and tokens."""
    import numpy as np
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    torch.manual_seed(1)
    c = LlamaConfig(max_position_embeddings=2048, **config)
    LlamaForCausalLM(c).save_pretrained(folder)
    ids = np.random.RandomState(1).zipf(1.3, args.steps_at_most * args.seqs * args.length + 1) % c.vocab_size
    ids.astype(np.uint16).tofile(os.path.join(folder, "ids.bin"))


def write_llama_gguf(folder, path):
    """Writes LLaMA's weights in llama.cpp's format, in f16, with a made-up vocabulary."""
    import gguf
    import numpy as np
    from transformers import LlamaForCausalLM
    model = LlamaForCausalLM.from_pretrained(folder)
    c = model.config
    w = gguf.GGUFWriter(path, "llama")
    w.add_name("random")
    w.add_block_count(c.num_hidden_layers)
    w.add_context_length(c.max_position_embeddings)
    w.add_embedding_length(c.hidden_size)
    w.add_feed_forward_length(c.intermediate_size)
    w.add_head_count(c.num_attention_heads)
    w.add_head_count_kv(c.num_key_value_heads)
    w.add_rope_dimension_count(c.hidden_size // c.num_attention_heads)
    w.add_layer_norm_rms_eps(c.rms_norm_eps)
    w.add_vocab_size(c.vocab_size)
    w.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    w.add_tokenizer_model("llama")
    w.add_tokenizer_pre("default")
    w.add_token_list([b"<unk>", b"<s>", b"</s>"] + [b"w%d" % k for k in range(3, c.vocab_size)])
    w.add_token_scores([-float(k) for k in range(c.vocab_size)])
    w.add_token_types([gguf.TokenType.NORMAL] * c.vocab_size)
    names = {"input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
             "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
             "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
             "mlp.down_proj": "ffn_down"}
    for name, x in model.state_dict().items():
        x = x.numpy()
        if name.startswith("model.layers."):
            layer, module = name[len("model.layers."):-len(".weight")].split(".", 1)
            to = f"blk.{layer}.{names[module]}.weight"
            if module in ("self_attn.q_proj", "self_attn.k_proj"):   # llama.cpp turns neighbouring columns
                heads = c.num_attention_heads if "q_proj" in module else c.num_key_value_heads
                x = x.reshape(heads, 2, -1, x.shape[1]).swapaxes(1, 2).reshape(x.shape)
        else:
            to = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight",
                  "lm_head.weight": "output.weight"}[name]
        w.add_tensor(to, np.ascontiguousarray(x.astype(np.float16 if x.ndim == 2 else np.float32)))
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


def few_bits(args, report):
    shape = {"vocab_size": 32000, "hidden_size": 1024, "num_hidden_layers": args.layers or 16,
             "num_attention_heads": 16, "num_key_value_heads": 16, "intermediate_size": 2816}
    with tempfile.TemporaryDirectory() as folder:
        make_llama(folder, args, shape)
        half = os.path.join(folder, "f16.gguf")
        write_llama_gguf(folder, half)
        files = {"f16": half}
        for kind in ("q8_0", "q4_0"):
            files[kind] = os.path.join(folder, kind + ".gguf")
            subprocess.run([os.path.join(args.llama_cpp, "llama-quantize"), half, files[kind], kind.upper(),
                            str(args.threads)], check=True, stdout=subprocess.DEVNULL,
                           stderr=subprocess.DEVNULL)
        command = [program(args, "lm"), "--json", "--model", folder, "--data",
                   os.path.join(folder, "ids.bin"), "--generate", str(args.tokens), "--prompt",
                   str(args.prompt), "--threads", str(args.threads), "--precision", args.precision]

        def ours(form):
            rows = rows_of(output_of(command + (["--store", form] if form else [])))
            return (rows["tokens a second, after the first"]["value"], rows["planned memory"]["value"])

        def theirs(kind):
            out = output_of([os.path.join(args.llama_cpp, "llama-bench"), "-m", files[kind], "-p", "0", "-n",
                             str(args.tokens), "-d", str(args.prompt), "-r", "1", "-t", str(args.threads),
                             "-o", "json"])
            return json.loads(out)[0]["avg_ts"], os.path.getsize(files[kind]) / 1e6
        pairs = ((None, "f16"), ("int8", "q8_0"), ("nf4", "q4_0"), ("int4", "q4_0"))
        best = {}
        for _ in range(args.rounds):        # the programs run in turn, and each keeps its best round
            for form, kind in pairs:
                for side, measure in (((form, 0), ours), ((kind, 1), theirs)):
                    best[side] = max(best.get(side, (0, 0)), measure(side[0]))
        for form, kind in pairs:
            name = f"LLaMA, {args.tokens} tokens behind {args.prompt}, {form or args.precision}"
            report.row(f"{name}, llama.cpp {kind}", best[form, 0][0], "tokens/s", best[kind, 1][0],
                       who="llama.cpp")
            report.row(f"{name}, planned memory; llama.cpp's file", best[form, 0][1], "MB", best[kind, 1][1],
                       who="llama.cpp")


def qlora_turns(args):
    """Runs a step of adapters on a base in NF4 for each line of standard input, with peft."""
    torch = threads(args.threads)
    import numpy as np
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig
    how = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
                             bnb_4bit_compute_dtype=torch.float32)
    base = AutoModelForCausalLM.from_pretrained(args.folder, quantization_config=how, dtype=torch.float32,
                                                device_map="cpu")
    model = PeftModel.from_pretrained(base, os.path.join(args.folder, "adapter"), is_trainable=True).train()
    adapters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(adapters, lr=1e-4, weight_decay=0.01)
    ids = torch.from_numpy(np.fromfile(os.path.join(args.folder, "ids.bin"), np.uint16).astype(np.int64))
    tokens, k = args.seqs * args.length, 0
    for _ in sys.stdin:
        x, y = (ids[k * tokens + n:(k + 1) * tokens + n].view(args.seqs, args.length) for n in (0, 1))
        k += 1
        began = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        loss = torch.nn.functional.cross_entropy(model(input_ids=x).logits.view(tokens, -1).float(),
                                                 y.reshape(tokens))
        loss.backward()
        optimizer.step()
        print(json.dumps({"name": "step", "value": time.perf_counter() - began, "unit": "s",
                          "loss": loss.item()}), flush=True)


def qlora(args, report):
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaForCausalLM
    shape = {"vocab_size": 2048, "hidden_size": 256, "num_hidden_layers": args.layers or 4,
             "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 704}
    with tempfile.TemporaryDirectory() as folder:
        make_llama(folder, args, shape)
        torch.manual_seed(2)
        peft = get_peft_model(LlamaForCausalLM.from_pretrained(folder),
                              LoraConfig(r=16, lora_alpha=32, target_modules=["q_proj", "v_proj"]))
        peft.save_pretrained(os.path.join(folder, "adapter"))
        sizes = ["--seqs", str(args.seqs), "--length", str(args.length), "--threads", str(args.threads)]
        both = (Steps("tinytrain nf4",
                      [program(args, "lm"), "--json", "--turns", "--model", folder, "--store", "nf4",
                       "--adapter", os.path.join(folder, "adapter"), "--data",
                       os.path.join(folder, "ids.bin"), "--precision", "32-true"] + sizes),
                Steps("peft, bitsandbytes nf4", [sys.executable, HERE, "qlora-turns", "--folder", folder] +
                      sizes))
        for _ in range(args.rounds):
            for side in both:
                side.turn()
        for side in both:
            side.finish()
        report.say(f"loss {both[0].losses[0]:.5f} to {both[0].losses[-1]:.5f}; peft and bitsandbytes "
                   f"{both[1].losses[0]:.5f} to {both[1].losses[-1]:.5f}")
        report.row(f"adapters of rank 16 on NF4, largest difference of {args.rounds} losses",
                   largest_difference(*both), "relative")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0],
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    subs = parser.add_subparsers(dest="task", required=True)
    for name, about in (("train", "training steps"), ("losses", "of training steps"),
                        ("generate", "tokens a second"), ("few-bits", "tokens a second in 8 and 4 bits"),
                        ("qlora", "losses of adapters on a base in NF4"), ("turns", "PyTorch's side"),
                        ("qlora-turns", "peft's side")):
        s = subs.add_parser(name, help=about)
        s.add_argument("--threads", type=positive, default=len(os.sched_getaffinity(0)), metavar="N")
        s.add_argument("--json", action="store_true", help="an object a line")
        s.add_argument("--build", default="build", metavar="DIR", help="where build/lm is (build)")
        s.add_argument("--rounds", type=positive, metavar="N",
                       default={"train": 5, "losses": 50, "few-bits": 3, "qlora": 20}.get(name, 2))
        s.add_argument("--layers", type=positive, metavar="N", help="of the model, if not 12")
        s.add_argument("--seqs", type=positive, default=4, metavar="N")
        s.add_argument("--length", type=positive, default=256, metavar="N")
        s.add_argument("--steps-at-most", type=positive, default=64, metavar="N", help="that differ (64)")
    for name in "train", "losses":
        subs.choices[name].add_argument("--precisions", nargs="+", choices=list(PAIRS),
                                        default=["32-true", "bf16-mixed"])
    for name in "generate", "few-bits":
        g = subs.choices[name]
        g.add_argument("--precision", choices=["32-true", "bf16-true"], default="32-true")
        g.add_argument("--tokens", type=positive, default=128, metavar="N")
        g.add_argument("--prompt", type=positive, default=16, metavar="N")
    g.add_argument("--llama-cpp", required=True, metavar="BIN", help="folder of llama-bench, llama-quantize")
    g = subs.choices["generate"]
    g.add_argument("--llama", choices=["f16", "f32"], help="beside llama.cpp, with its weights so")
    subs.choices["turns"].add_argument("--variant", required=True)
    for name in "turns", "qlora-turns":
        subs.choices[name].add_argument("--folder", required=True)
    args = parser.parse_args()
    report = Report(args.json)
    tasks = {"train": train, "losses": losses, "generate": generate, "few-bits": few_bits, "qlora": qlora}
    others = {"turns": turns, "qlora-turns": qlora_turns}
    if args.task in tasks:
        tasks[args.task](args, report)
    else:
        others[args.task](args)


if __name__ == "__main__":
    main()
