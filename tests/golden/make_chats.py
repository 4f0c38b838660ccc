"""Writes tests/golden/chats/: what transformers makes of conversations.

    python tests/golden/make_chats.py

chats/NAME.jinja are templates with the constructs of the templates of Qwen 2.5 and 3, Llama 3.2, Mistral 7B v0.3,
Gemma, Zephyr and ChatML, and tools.jinja with those of templates that call tools; their texts were written for
these tests. conversations.jsonl has 200 random conversations, tools.jsonl has 100 with tools. NAME.txt has a line for each conversation, of 64-bit FNV-1a hashes: of the text, of the text with
the start of an answer at the end, and of the ids (i32, little-endian) with a byte of 0 or 1 after each id, which
is 1 for the tokens of answers; "-" where transformers refuses the conversation or there is no reference.

The reference says which tokens belong to answers. For templates with the tag `generation`, the reference is
`assistant_masks` of transformers. For other templates, the reference is computed as trl does for a prompt and
its completion: the tokens of an answer are those of "prompt with answer" after the common prefix of "prompt"
and "prompt with answer". If the conversation does not begin with the tokens of "prompt with answer", there is
no reference."""
import json
import os
import random
import re

from transformers import PreTrainedTokenizerFast

here = os.path.dirname(os.path.abspath(__file__))
to = os.path.join(here, "chats")
# The tokenizer of each template: a folder of tests/golden/bpe, bos_token and eos_token.
TEMPLATES = {"chatml": ("qwen2", None, "<|im_end|>"), "qwen2": ("qwen2", None, "<|im_end|>"),
             "qwen3": ("qwen2", None, "<|im_end|>"), "llama3": ("llama3", "<|begin_of_text|>", "<|eot_id|>"),
             "mistral": ("mistral", "<s>", "</s>"), "gemma": ("llama2", "<s>", "</s>"),
             "zephyr": ("llama2", "<s>", "</s>"), "tools": ("qwen2", None, "<|im_end|>")}
PIECES = ("hello", "world", " ", "  ", "\n", "\n\n", "\t", "\r\n", "é", "中文", "😀", "e\u0301", "\u00a0", "\u3000",
          "\u2028", "\x85", "\x1f", "\x0b", "'", '"', "\\", "<b>&amp;</b>", "<think>", "</think>", "\n<think>\nso\n",
          "</think>\n\n", "<|im_end|>", "</s>", "[INST]", "{{ x }}", "{% if %}", "12345", "What is it?", "It is 7.",
          "don't", "the film", ".", ",", "ǅ", "\ufeff", "a" * 40)


def conversation(random):
    def text():
        n = random.choice((0, 1, 1, 2, 3, 5, 8))
        return "".join(random.choice(PIECES) + random.choice(("", " ", "")) for _ in range(n))
    messages = []
    if random.random() < 0.5:
        messages.append({"role": "system", "content": text()})
    for turn in range(random.choice((1, 1, 2, 2, 3, 4))):
        messages.append({"role": "user", "content": text()})
        answer = {"role": "assistant", "content": text()}
        if random.random() < 0.1:
            answer["reasoning_content"] = text()
        messages.append(answer)
    if random.random() < 0.1: # roles that do not alternate, or the user's message at the end
        messages.insert(random.randrange(1, len(messages) + 1), {"role": "user", "content": text()})
    for message in messages:
        if random.random() < 0.1:
            message["name"] = random.choice((None, 7, "x"))
    return {"messages": messages}


def value(random, depth=0):
    """Returns a random value of JSON."""
    kind = random.randrange(9 if depth < 2 else 6)
    if kind < 7:
        return (random.choice(PIECES), random.randrange(-5, 10**random.choice((1, 3, 12))),
                random.choice((0.5, 1e-7, 3.0, -2.25, 123456.789, 1e16, 5e-5, 0.1 + 0.2)), True, False, None,
                random.choice(PIECES))[kind]
    some = [value(random, depth + 1) for _ in range(random.randrange(4))]
    return some if kind == 7 else dict(zip(random.sample(("a", "B", "city", "n"), len(some)), some))


def with_tools(random):
    """Returns a conversation in which some answers call tools."""
    chat = conversation(random)
    names = ("get_weather", "add", "search")
    tools = [{"type": "function", "function": {"name": name, "description": random.choice(PIECES), "parameters": {
        "type": "object", "properties": {p: {"type": random.choice(("string", "number", "array")),
                                             "enum": [value(random) for _ in range(random.randrange(3))]}
                                         for p in random.sample(("city", "Unit", "count"), random.randrange(4))}}}}
             for name in random.sample(names, random.randrange(1, 4))]
    messages = []
    for message in chat["messages"]:
        while message["role"] == "assistant" and random.random() < 0.5:
            calls = [{"type": "function", "id": f"c{k}", "function": {"name": random.choice(names), "arguments": {
                p: value(random) for p in random.sample(("city", "Unit", "count"), random.randrange(4))}}}
                for k in range(random.choice((1, 1, 2)))]
            said = {"role": "assistant", "content": random.choice((None, "", "so")), "tool_calls": calls}
            if said["content"] is None and random.random() < 0.5:
                del said["content"]
            if random.random() < 0.2:
                said[random.choice(("thinking", "reasoning", "reasoning_content"))] = random.choice(PIECES)
            messages += [said] + [{"role": "tool", "tool_call_id": c["id"], "content": json.dumps(value(random))}
                                  for c in calls]
        messages.append(message)
    return {"messages": messages, **({"tools": tools} if random.random() < 0.8 else {})}


def fnv(data):
    h = 14695981039346656037
    for byte in data:
        h = (h ^ byte) * 1099511628211 % 2**64
    return f"{h:016x}"


def common(a, b):
    n = 0
    while n < min(len(a), len(b)) and a[n] == b[n]:
        n += 1
    return n


def mask_of(tokenizer, messages, tools):
    """Returns the ids and the mask of answers, or None if there is no reference."""
    if re.search(r"{%-?\s*generation", tokenizer.chat_template):
        out = tokenizer.apply_chat_template(messages, tools, return_assistant_tokens_mask=True, return_dict=True)
        return out["input_ids"], out["assistant_masks"]
    ids = tokenizer.apply_chat_template(messages, tools)["input_ids"]
    mask = [0] * len(ids)
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        prompt = tokenizer.apply_chat_template(messages[:i], tools, add_generation_prompt=True)["input_ids"]
        whole = tokenizer.apply_chat_template(messages[:i + 1], tools)["input_ids"]
        begin = common(prompt, whole)
        if ids[:len(whole)] != whole:
            return None
        mask[begin:len(whole)] = [1] * (len(whole) - begin)
    return ids, mask


def line(tokenizer, messages, tools=None):
    try:
        texts = [tokenizer.apply_chat_template(messages, tools, tokenize=False, add_generation_prompt=p)
                 for p in (False, True)]
    except Exception:
        return "- - -"
    found = mask_of(tokenizer, messages, tools)
    tokens = b"".join(id.to_bytes(4, "little") + bytes([m]) for id, m in zip(*found)) if found else b""
    answers = fnv(tokens) if found and 1 in found[1] else "-"
    return " ".join([*(fnv(t.encode()) for t in texts), answers])


def main():
    rng = random.Random(7)
    chats = [conversation(rng) for _ in range(200)]
    called = [with_tools(rng) for _ in range(100)]
    for name, of in (("conversations", chats), ("tools", called)):
        with open(os.path.join(to, name + ".jsonl"), "w", encoding="utf-8") as f:
            f.writelines(json.dumps(c, ensure_ascii=False) + "\n" for c in of)
    for name, (folder, bos, eos) in TEMPLATES.items():
        with open(os.path.join(to, name + ".jinja"), encoding="utf-8") as f:
            template = f.read()
        tokenizer = PreTrainedTokenizerFast(tokenizer_file=os.path.join(here, "bpe", folder, "tokenizer.json"),
                                            bos_token=bos, eos_token=eos)
        tokenizer.chat_template = template
        lines = [line(tokenizer, **c) for c in (called if name == "tools" else chats)]
        with open(os.path.join(to, name + ".txt"), "w", encoding="utf-8") as f:
            f.writelines(x + "\n" for x in lines)
        print(name, sum(x[0] != "-" for x in lines), "texts,", sum(x[-1] != "-" for x in lines), "masks")


if __name__ == "__main__":
    main()
