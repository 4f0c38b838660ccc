"""Writes tests/fuzz/corpus/TARGET/, the inputs from which fuzzing starts: `python3
tests/fuzz/make_corpus.py`.

The head of each target describes its input. `make fuzz` checks that the library accepts inputs named good_*
without an error. So a changed format that makes old inputs useless is noticed."""

import base64
import json
import os
import struct

here = os.path.dirname(os.path.abspath(__file__))
golden = os.path.join(here, "..", "golden")
PART = b"\n%%\n"


def write(target, name, data):
    folder = os.path.join(here, "corpus", target)
    os.makedirs(folder, exist_ok=True)
    assert len(data) < 4096, (target, name, len(data))
    with open(os.path.join(folder, name), "wb") as f:
        f.write(data)


def read(*path):
    with open(os.path.join(golden, *path), "rb") as f:
        return f.read()


# ---- safetensors


def safetensors(header, data, spaces=0):
    text = (
        header if isinstance(header, str) else json.dumps(header, separators=(",", ":"))
    ).encode() + b" " * spaces
    return struct.pack("<Q", len(text)) + text + data


def tensor(dtype, shape, begin, end):
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


write("safetensors", "good_none", safetensors("{}", b""))
metadata = {"__metadata__": {"format": "pt", "other": "é\n"}}
write("safetensors", "good_metadata", safetensors(metadata, b"", 4))
write(
    "safetensors",
    "good_two",
    safetensors(
        {"a": tensor("F32", [2, 3], 0, 24), "b.weight": tensor("BF16", [3], 24, 30)},
        struct.pack("<6f3H", 1, -2, 0.5, float("inf"), 3e38, 1e-40, 0x3F80, 0x7FC0, 0xC000),
    ),
)
kinds = [
    ("F32", 4),
    ("BF16", 2),
    ("F16", 2),
    ("F64", 8),
    ("I64", 8),
    ("I32", 4),
    ("I16", 2),
    ("I8", 1),
    ("U8", 1),
    ("BOOL", 1),
    ("U16", 2),
    ("U32", 4),
    ("U64", 8),
    ("C64", 8),
    ("F8_E4M3", 1),
    ("F8_E5M2", 1),
]
header, at = {"__metadata__": {"format": "pt"}}, 0
for kind, size in kinds:
    header["t." + kind] = tensor(kind, [2, 1], at, at + 2 * size)
    at += 2 * size
write("safetensors", "good_all_dtypes", safetensors(header, bytes((37 * k) % 251 for k in range(at))))
write(
    "safetensors",
    "good_empty_and_scalar",
    safetensors(
        {"s": tensor("F64", [], 0, 8), "e": tensor("I8", [0, 7], 8, 8), "f": tensor("F4", [2, 2], 8, 10)},
        b"\0" * 10,
    ),
)
write(
    "safetensors",
    "overlap",
    safetensors({"a": tensor("U8", [4], 0, 4), "b": tensor("U8", [4], 2, 6)}, b"\0" * 6),
)
write(
    "safetensors",
    "hole",
    safetensors({"a": tensor("U8", [1], 0, 1), "b": tensor("U8", [1], 3, 4)}, b"\0" * 4),
)
write("safetensors", "huge", safetensors({"a": tensor("F32", [4294967296, 4294967296], 0, 0)}, b""))
write(
    "safetensors",
    "twice",
    safetensors(
        '{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},'
        '"a":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}}',
        b"\0\0",
    ),
)
write("safetensors", "truncated", safetensors({"a": tensor("F32", [9], 0, 36)}, b"\0" * 20))
write(
    "safetensors",
    "escapes",
    safetensors(
        '{ "\\u00e9\\ud83d\\ude00\\n" : {"shape":[1e0, 1],"dtype":"U\\u0038",'
        '"data_offsets":[0,1], "x":[null,true,{}]} }',
        b"\0",
    ),
)
write("safetensors", "long_header", struct.pack("<Q", 1 << 40) + b"{}")


# ---- folders of models


def lines(tensors, dtype="F32"):
    return "".join(f"{name} {dtype} {' '.join(map(str, shape))}\n" for name, shape in tensors).encode()


def bert(distil, H=4, F=6, V=7, P=5, T=2, C=2):
    if distil:
        e, layer, out = (
            "distilbert.embeddings.",
            "distilbert.transformer.layer.0.",
            [("pre_classifier", H, H)],
        )
        linear = [
            ("attention.q_lin", H, H),
            ("attention.k_lin", H, H),
            ("attention.v_lin", H, H),
            ("attention.out_lin", H, H),
            ("ffn.lin1", F, H),
            ("ffn.lin2", H, F),
        ]
        norms = ["sa_layer_norm", "output_layer_norm"]
    else:
        e, layer, out = "bert.embeddings.", "bert.encoder.layer.0.", [("bert.pooler.dense", H, H)]
        linear = [
            ("attention.self.query", H, H),
            ("attention.self.key", H, H),
            ("attention.self.value", H, H),
            ("attention.output.dense", H, H),
            ("intermediate.dense", F, H),
            ("output.dense", H, F),
        ]
        norms = ["attention.output.LayerNorm", "output.LayerNorm"]
    t = [(e + "word_embeddings.weight", [V, H]), (e + "position_embeddings.weight", [P, H])]
    t += [] if distil else [(e + "token_type_embeddings.weight", [T, H])]
    t += [(e + "LayerNorm.weight", [H]), (e + "LayerNorm.bias", [H])]
    for name, rows, columns in [(layer + n, r, c) for n, r, c in linear] + out + [("classifier", C, H)]:
        t += [(name + ".weight", [rows, columns]), (name + ".bias", [rows])]
    for name in norms:
        t += [(layer + name + ".weight", [H]), (layer + name + ".bias", [H])]
    return t


def albert(H=4, E=3, F=6, V=7, P=5, T=2, C=2):
    e, layer = "albert.embeddings.", "albert.encoder.albert_layer_groups.0.albert_layers.0."
    t = [
        (e + "word_embeddings.weight", [V, E]),
        (e + "position_embeddings.weight", [P, E]),
        (e + "token_type_embeddings.weight", [T, E]),
        (e + "LayerNorm.weight", [E]),
        (e + "LayerNorm.bias", [E]),
    ]
    for name, rows, columns in [
        ("albert.encoder.embedding_hidden_mapping_in", H, E),
        (layer + "attention.query", H, H),
        (layer + "attention.key", H, H),
        (layer + "attention.value", H, H),
        (layer + "attention.dense", H, H),
        (layer + "ffn", F, H),
        (layer + "ffn_output", H, F),
        ("albert.pooler", H, H),
        ("classifier", C, H),
    ]:
        t += [(name + ".weight", [rows, columns]), (name + ".bias", [rows])]
    for name in [layer + "attention.LayerNorm", layer + "full_layer_layer_norm"]:
        t += [(name + ".weight", [H]), (name + ".bias", [H])]
    return t


bert_config = {
    "model_type": "bert",
    "vocab_size": 7,
    "hidden_size": 4,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 6,
    "max_position_embeddings": 5,
    "type_vocab_size": 2,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-12,
    "hidden_dropout_prob": 0.1,
    "attention_probs_dropout_prob": 0.0,
    "classifier_dropout": None,
    "initializer_range": 0.02,
    "id2label": {"0": "neg", "1": "pos"},
}
distil_config = {
    "model_type": "distilbert",
    "vocab_size": 7,
    "dim": 4,
    "n_layers": 1,
    "n_heads": 1,
    "hidden_dim": 6,
    "max_position_embeddings": 5,
    "activation": "relu",
    "dropout": 0.1,
    "attention_dropout": 0.2,
    "seq_classif_dropout": 0.3,
    "num_labels": 2,
}
vit_config = {
    "model_type": "vit",
    "hidden_size": 4,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 6,
    "image_size": 6,
    "patch_size": 2,
    "num_channels": 3,
    "qkv_bias": True,
    "hidden_act": "gelu",
    "id2label": {"0": "a", "1": "b", "2": "c"},
}
preprocessor = {
    "image_mean": [0.5, 0.4, 0.3],
    "image_std": [0.5, 0.5, 0.25],
    "do_normalize": True,
    "do_rescale": True,
    "rescale_factor": 1 / 255,
}


def vit(torchvision, H=4, F=6, P=2, D=3, N=10, C=3):
    if torchvision:
        layer = "encoder.layers.encoder_layer_0."
        return [
            ("class_token", [1, 1, H]),
            ("encoder.pos_embedding", [1, N, H]),
            ("conv_proj.weight", [H, D, P, P]),
            ("conv_proj.bias", [H]),
            (layer + "ln_1.weight", [H]),
            (layer + "ln_1.bias", [H]),
            (layer + "self_attention.in_proj_weight", [3 * H, H]),
            (layer + "self_attention.in_proj_bias", [3 * H]),
            (layer + "self_attention.out_proj.weight", [H, H]),
            (layer + "self_attention.out_proj.bias", [H]),
            (layer + "ln_2.weight", [H]),
            (layer + "ln_2.bias", [H]),
            (layer + "mlp.0.weight", [F, H]),
            (layer + "mlp.0.bias", [F]),
            (layer + "mlp.3.weight", [H, F]),
            (layer + "mlp.3.bias", [H]),
            ("encoder.ln.weight", [H]),
            ("encoder.ln.bias", [H]),
            ("heads.head.weight", [C, H]),
            ("heads.head.bias", [C]),
        ]
    e, layer = "vit.embeddings.", "vit.encoder.layer.0."
    t = [
        (e + "cls_token", [1, 1, H]),
        (e + "position_embeddings", [1, N, H]),
        (e + "patch_embeddings.projection.weight", [H, D, P, P]),
        (e + "patch_embeddings.projection.bias", [H]),
    ]
    for name, rows, columns in [
        (layer + "attention.attention.query", H, H),
        (layer + "attention.attention.key", H, H),
        (layer + "attention.attention.value", H, H),
        (layer + "attention.output.dense", H, H),
        (layer + "intermediate.dense", F, H),
        (layer + "output.dense", H, F),
        ("classifier", C, H),
    ]:
        t += [(name + ".weight", [rows, columns]), (name + ".bias", [rows])]
    for name in [layer + "layernorm_before", layer + "layernorm_after", "vit.layernorm"]:
        t += [(name + ".weight", [H]), (name + ".bias", [H])]
    return t


def folder(images, classes, image_size, config, pre, tensors):
    text = [json.dumps(c).encode() if c else b"" for c in (config, pre)]
    return bytes([images, classes, image_size]) + text[0] + PART + text[1] + PART + tensors


write("config", "good_bert", folder(0, 0, 0, bert_config, None, lines(bert(False))))
write(
    "config",
    "good_bert_without_prefix",
    folder(
        0,
        3,
        0,
        bert_config,
        None,
        lines([(n.replace("bert.", "", 1), s) for n, s in bert(False) if "pooler" not in n], "BF16"),
    ),
)
write("config", "good_distilbert", folder(0, 0, 0, distil_config, None, lines(bert(True), "F64")))
modules = [{"type": "a.Transformer"}, {"type": "a.Pooling", "path": "1_Pooling"}, {"type": "a.Normalize"}]
write("config", "good_embedder", folder(0, 0, 0, bert_config, modules, lines(bert(False))))
tagger = dict(bert_config, architectures=["BertForTokenClassification"])
write("config", "good_tagger", folder(0, 0, 0, tagger, None, lines(bert(False))))
several = dict(bert_config, problem_type="multi_label_classification")
write("config", "good_labels", folder(0, 0, 0, several, None, lines(bert(False))))
albert_config = dict(bert_config, model_type="albert", embedding_size=3, num_hidden_layers=2)
write("config", "good_albert", folder(0, 0, 0, albert_config, None, lines(albert())))
write("config", "good_vit", folder(1, 0, 0, vit_config, preprocessor, lines(vit(False))))
write("config", "good_vit_other_size", folder(1, 0, 8, vit_config, None, lines(vit(False), "F16")))
write(
    "config", "good_vit_torchvision", folder(1, 0, 0, dict(vit_config, num_labels=3), None, lines(vit(True)))
)
write(
    "config", "good_vit_file_alone", folder(1, 0, 0, None, None, lines(vit(True, H=64, F=8, P=1, D=1, N=5)))
)
write(
    "config",
    "many_layers",
    folder(0, 0, 0, dict(bert_config, num_hidden_layers=4000), None, lines(bert(False))),
)
write(
    "config",
    "many_channels",
    folder(1, 0, 0, dict(vit_config, num_channels=500), {"do_normalize": False}, lines(vit(False, D=5))),
)
write(
    "config",
    "same_names",
    folder(0, 0, 0, dict(bert_config, id2label={"0": "crane", "1": "crane"}), None, lines(bert(False))),
)
write(
    "config",
    "large_numbers",
    folder(
        0, 0, 0, dict(bert_config, layer_norm_eps=1e300, initializer_range=-1e39), None, lines(bert(False))
    ),
)

# ---- vocabularies and texts

vocab = b"[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\n!\n,\n.\n'\n"
words = (
    "the film was good bad un ##able ##s ##ing cafe caf ##e a b c ##a ##b ##c "
    "ß 中 国 é ##é i\u0307 0 1 ##1 😀".replace(
        " ", "\n"
    ).encode()
    + b"\n"
)
for k, text in enumerate(read("tokens_uncased.tsv").split(b"\n")[:60:6]):
    write("tokenizer", f"good_golden_{k}", bytes([2 + 4 * k]) + vocab + words + PART + PART + text[:600])
write(
    "tokenizer",
    "good_cased",
    bytes([40]) + vocab + words + PART + PART + "The FILM was Unable, cafés. 中国! 😀 é".encode(),
)
write(
    "tokenizer",
    "good_folder",
    bytes([1]) + vocab + words + PART + b'{"do_lower_case": false, "strip_accents": null}' + PART + b"Films!",
)
write(
    "tokenizer",
    "good_line_ends",
    bytes([2])
    + (vocab + words).replace(b"\n", b"\r\n")
    + PART
    + PART
    + b"the\r\nfilm\0was \xff\xc3 \xe2\x80\x8b good",
)
write("tokenizer", "more_line_ends", bytes([2]) + vocab + b"a\r\r\nb\r\n\r\n\nc" + PART + PART + b"a b c")
write(
    "tokenizer",
    "good_marks",
    bytes([2])
    + vocab
    + words
    + PART
    + PART
    + "a\u0301\u0323b\u0345 \u1100\u1161\u11a8 ǅ İ ſ \u061d \u0315\u0300 ﬁ".encode(),
)
write("tokenizer", "good_long_word", bytes([2]) + vocab + words + PART + PART + b"a" * 150 + b" " + b"b" * 99)

# ---- byte-pair tokenizers


def reduced(name, text):
    """Returns the JSON of a tokenizer of tests/golden/bpe with only the tokens that `text` needs."""
    j = json.loads(read("bpe", name, "tokenizer.json"))
    model, added = j["model"], [t["content"] for t in j["added_tokens"][:6]]
    if model["type"] == "Unigram":
        few = [pair for pair in model["vocab"] if set(pair[0]) <= set(text) | {"\u2581"}][:24]
        model["vocab"], model["unk_id"] = [["<unk>", 0.0], *few], 0
        # The trie replaces "q" by "kw": one entry is for the byte "q", and the next entry says where "kw" is.
        trie = [0] * 120
        trie[ord("q")], trie[ord("q") ^ 1] = 1 << 10 | 1 << 8 | ord("q"), 1 << 31
        rules = struct.pack("<121I", 480, *trie) + b"kw\0"
        for step in j["normalizer"]["normalizers"]:
            if step["type"] == "Precompiled":
                step["precompiled_charsmap"] = base64.b64encode(rules).decode()
        j["added_tokens"], j["post_processor"] = [{"id": 30, "content": "<s>", "special": True}], None
        return json.dumps(j, ensure_ascii=False, separators=(",", ":")).encode()
    if model["type"] == "WordPiece":
        few = [*added, *(t for t in model["vocab"] if set(t) <= set(text.lower()) | {"#"})]
        model["vocab"] = {token: model["vocab"][token] for token in few[:60] if token in model["vocab"]}
        return json.dumps(j, ensure_ascii=False, separators=(",", ":")).encode()
    mapped = set(text if model["byte_fallback"] or model["unk_token"] else byte_level(text))
    merges = [m for m in model["merges"] if set("".join(m)) <= mapped][:14]
    keep = mapped | {"".join(m) for m in merges} | {part for m in merges for part in m}
    keep |= {f"<0x{b:02X}>" for b in "é".encode()} | {"\u2581"} | set(added)
    model["merges"] = merges
    model["vocab"] = {token: id for token, id in model["vocab"].items() if token in keep}
    j["added_tokens"] = j["added_tokens"][:6]
    return json.dumps(j, ensure_ascii=False, separators=(",", ":")).encode()


def byte_level(text):
    """Returns the characters that stand for the bytes of a text in byte-level encoding."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in plain]
    return "".join(chr(b) if b in plain else chr(256 + others.index(b)) for b in text.encode())


text = "The the  quick\n é 12345 it's!"
kinds = sorted((name for name in os.listdir(os.path.join(golden, "bpe")) if not name.startswith("front_")),
               key=lambda name: ("wordpiece" in name, name in ("albert", "big_bird", "t5"), name))
for k, name in enumerate(kinds):
    if name != "gpt2_files":
        config = b'{"eos_token": "</s>", "pad_token": {"content": "<pad>"}}' if k % 3 == 0 else b""
        more = f" {text} <s><|endoftext|>[INST] \u00a0x\u0301ab".encode() + b"\xff\xe4\xb8"
        write("bpe", "good_" + name, bytes([2 * k]) + reduced(name, text) + PART + config + PART + more)
gpt2 = json.loads(reduced("gpt2", text))["model"]
merges = "#version: 0.2\n" + "".join(" ".join(m) + "\n" for m in gpt2["merges"])
for name in "GPT2Tokenizer", "RobertaTokenizer", "Qwen2Tokenizer":
    config = {"tokenizer_class": name, "add_prefix_space": name[0] == "R"}
    config["added_tokens_decoder"] = {"600": {"content": "<mask>", "lstrip": True, "special": True}}
    vocab = dict(gpt2["vocab"])
    for id, token in enumerate(("<s>", "<pad>", "</s>", "<unk>")):
        vocab[token] = 700 + id
    parts = [json.dumps(vocab, ensure_ascii=False).encode(), merges.encode(), json.dumps(config).encode()]
    write("bpe", "good_files_" + name[:4].lower(), b"\x0f" + PART.join([*parts, f"{text} <mask> a".encode()]))

# ---- tables

write(
    "table",
    "good_csv",
    b'\0\x01text,label\ngood film,pos\nbad,neg\n"a ""quoted"", one\nof two lines",pos\r\n\nlast,neg',
)
write(
    "table",
    "good_tsv",
    b'\1\x12label\ttext\tsplit\r\npos\tgood\ttrain\r\nneg\t"bad\t"\ttrain\r\nneg\tother\ttest\r\n',
)
write(
    "table", "good_train", b"\3\x22label\ttext\tsplit\npos\tgood\ttrain\nneg\tbad\ttrain\nneg\tother\ttest\n"
)
write(
    "table",
    "good_divided",
    b"\2\x03text,label\n" + b"".join(b"film %d,%s\n" % (k, b"neg" if k % 2 else b"pos") for k in range(24)),
)
write("table", "good_without_tests", b"\4\0text,label,split\ngood,pos,train\n")
write("table", "good_given", b"\x08\x93id,text,label\n1,good,pos\n2,bad,neg\n3,,1\n")
write("table", "good_mark", b"\0\0\xef\xbb\xbftext,label\n\xc3\xa9,\xe4\xb8\xad\n")
write("table", "not_closed", b'\0\0text,label\n"a,b\nc,d\n')
write("table", "not_utf8", b"\0\0text,label\n\xff\xfe,\xff\n")
write("table", "nul", b"\0\0text,label\na\0b,c\0d\n")
write(
    "table",
    "good_validation",
    b"\6\x02text,label,split\na,x,train\nb,y,validation\nc,x,validation\nd,y,test\n",
)

LINES = b'{"text":"good","text_pair":"film","label":%s}\n{"text":"bad","label":%s,"split":"test"}\n'
write("table", "good_lines", b"\x40\0" + LINES % (b'"a"', b"2"))
write("table", "good_lines_labels", b"\xc0\3" + LINES % (b'["a","b"]', b"[]"))
write("table", "good_lines_values", b"\xc0\6" + LINES % (b"[0,1]", b"[true,0.0]"))
write("table", "good_lines_scores", b"\xc0\1" + LINES % (b"-2.5e0", b"[1]"))
write("table", "good_lines_tags", b'\xc0\2{"tokens":["good","film"],"tags":["O",-100]}\n{"tokens":["a"],"tags":["B-X"]}\n')
write("table", "good_conll", b"\x80\2-DOCSTART- O\n\ngood NN O\nfilm\tNN\tB-X \r\n\nbad O")
write("table", "good_labels", b'\x80\3text,label\ngood,"a, b"\nbad,\n')
write("table", "good_scores", b'\x80\1text,text_pair,label\ngood,film,".5,1e2"\nbad,,"-1,+2."\n')

# ---- conversations

CHATS = b'''{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "<think>b</think>ab"}]}
{"prompt": "ab", "completion": "c"}
{"conversations": [{"from": "user", "value": "a"}, {"from": "assistant", "value": "c"}], "x": [1, {"y": 0.5}]}
'''
for k, name in enumerate(("chatml", "qwen2", "qwen3", "llama3", "mistral", "zephyr")):
    flags = (4 if k % 2 else 0) + 16 * k
    write("chat", "good_" + name, bytes([flags]) + read("chats", name + ".jinja") + PART + CHATS)
more = (
    b"{% set n = namespace(x=[1, 'b']) %}{% for c in 'abc'[::-1] if c != 'b' %}{% set n.x = n.x + [loop.index, c] %}"
    b"{% if loop.index > 5 %}{% break %}{% endif %}{% endfor %}{{ n.x|tojson }}{{ 'a,b'.split(',')|join('-') }}"
    b"{% set t %}{{ range(3)|list|length * 2 % 4 }}{% endset %}{{ t.replace('2', 'c')|default('x', true) }}"
    b"{% for k, v in {'a': 1}.items() %}{{ k ~ v }}{% else %}x{% endfor %}{{ messages|selectattr('role')|first is mapping }}"
)
write("chat", "good_more", b"\x1c" + more + PART + CHATS)
TOOLS = (b'{"tools": [{"function": {"name": "f", "description": "A", "parameters": {"properties": {"x": {"type": "a"}}}}}], '
         b'"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"x": [1.5, {"B": null}]}}}]}, '
         b'{"role": "tool", "content": "1"}, {"role": "assistant", "content": "b", "thinking": "c"}]}\n')
write("chat", "good_tools", b"\x04" + read("chats", "tools.jinja") + PART + TOOLS)

# ---- runs

write("state", "good_unchanged", b"")
write("state", "good_space", b"\0\x08\x01\0")
for name, at in (
    ("version", 0),
    ("step", 2),
    ("epoch", 3),
    ("best", 8),
    ("loss_scale", 17),
):  # writes -1 over 8 bytes, at a position that edit() takes modulo the file's size
    write("state", "number_" + name, struct.pack(">HBB", 0x4000 + 8 * at, 0, 8) + struct.pack("<q", -1))
write("state", "insert_and_delete", struct.pack(">HBB", 20, 1, 3) + b"abc" + struct.pack(">HBB", 60, 2, 5))
write("state", "longer_header", struct.pack(">HBB", 0, 0, 2) + b"\xff\xff")
line = b"1,1,train,0.693147,0.5,5e-05,1.25,1,0,4096,0.5,1234\n"
write("metrics", "good_empty", b"\1")
validation = b"1,1,validation,0.7,0.5,,,,,,0.5,\n"
write("metrics", "good_lines", b"\1" + line + validation + line.replace(b"1", b"2", 1))
large = line.replace(b"0.693147", b"1e30") + b"0,1,validation,9.1e16,0.5,,,,,,,\n"
write("metrics", "good_large", b"\1" + large)
write("metrics", "good_odd", b"\1,,,,\n1,1,train,nan,\n-1,1,train,-1,\n1,1,validation,-1e308,0\n1")
write("metrics", "other_columns", b"\0step,epoch,split,loss,accuracy,lr,tokens_per_second\n" + line)

# ---- images

names = b"airplane\nautomobile\nbird\ncat\ndeer\ndog\nfrog\nhorse\nship\ntruck\n"
pixels = bytes((k * k + 7 * k) % 256 for k in range(600))
write("image", "good_cifar", b"\0\2" + PART[:4] + b"\3" + pixels)
write("image", "good_cifar_names", b"\0\2" + names + PART + b"\7" + pixels[:90])
write("image", "good_cifar_record", b"\0\0" + PART[:4] + (b"\5" + pixels * 6)[:3073])
write("image", "good_resize_grey", bytes([1, 0, 0, 9, 12, 0, 5, 30]) + pixels[:100])
write("image", "good_resize_rgb", bytes([1, 0, 2, 30, 20, 0, 64, 7]) + pixels)
write("image", "good_resize_alpha", bytes([1, 0, 3, 10, 10, 0, 10, 10]) + pixels)
write("image", "good_resize_narrow", bytes([1, 1, 0, 200, 0, 1, 1, 0, 9, 2]) + pixels)
write("image", "good_loader", bytes([2, 0, 2, 9, 12, 1, 0, 8, 8, 3, 0]) + pixels)
write(
    "image",
    "good_loader_random",
    bytes([2, 0, 2, 20, 16, 1, 4 + 16 + 32 + 64, 12, 12, 3, 16, 14, 2, 1]) + pixels,
)
write("image", "good_ppm", b"\3P6\n# two pixels\n1 2 255\n" + pixels[:6])
exif = b"Exif\0\0MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01\0\x06\0\0\0\0\0\0"
write("image", "good_jpeg", b"\3\xff\xd8\xff\xe1\0\x22" + exif)
write("image", "third_fails", bytes([2, 0, 2, 9, 12, 3, 0, 8, 8, 3, 0]) + pixels)
