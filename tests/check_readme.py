#!/usr/bin/env python3
"""Checks that the instructions of README.md, docs/, bench/README.md and CONTRIBUTING.md work. Standard
library only; run from the repository's root.

    python3 tests/check_readme.py

B: folder of the built examples (build), CC: compiler (cc), both from the environment.


  - every ```c block compiles unchanged, with -Werror, and has a mark that says how it runs:
    run             ends with 0 and prints the words of the block ```output, if that comes next
    resume          is killed after the step that the argument names, is started again, and must then print
                    and save the same as without the kill
    tune            trains a tiny model on a table
    predict         classifies a text with a tiny model
    labels          prints the labels of examples/data/requests.tsv
    similar         compares the embeddings of two texts
    pairs           trains embeddings on a table of pairs
    words           trains an encoder on the masked words of a text file
    distill         trains a student of half of the layers with a teacher
    continue        continues a text with a decoder of tokens and with one of bytes
    implementation  is the implementation for a file that only includes the header
    part            is a function, which a main of PARTS calls
  - the Makefile has every `make TARGET` and VARIABLE=... of a ```sh block or in `backticks`
  - every --flag of a command in a ```sh block or in `backticks` is in that program's --help (for a .py file,
    and for a bench, which the tests do not build: in its source)
  - the parser of an example accepts every flag of its --help, as --flag value and --flag=value, and refuses
    other flags
  - in README.md and docs/, every --flag that stands alone in `backticks` is in the --help of an example
  - every relative link leads to a file, and a link with an #anchor leads to a heading of that file
  - README.md has a link to each page of docs/; lines of text in docs/ have at most 110 columns
"""
import functools
import glob
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile

B, CC = os.environ.get("B", "build"), os.environ.get("CC", "cc").split()
# Compiles only portable kernels and does not optimise, because compiling takes longer than running.
CFLAGS = ("-O0", "-DTT__OPTIMIZED=true", "-DTINYTRAIN_NO_AVX2", "-std=c99", "-Wall", "-Wextra", "-Wpedantic",
          "-Werror", "-I.")
SHARED = tempfile.TemporaryDirectory() # holds what several programs are linked with
FLAG = r"--[a-z][a-z0-9-]*"
PAGES = sorted(glob.glob("docs/*.md"))
OF_OTHERS = {"--oversubscribe"}    # flags of mpirun
counts = {"ok": 0, "FAILED": 0, "skip": 0}


def report(word, name, why=""):
    counts[word] += 1
    print(f"{word} {name}{': ' + ' '.join(str(why).split())[:600] if why else ''}", flush=True)


def call(*command, seconds=300, folder=None):
    """Runs a command. Returns (exit status, stdout + stderr)."""
    done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                          text=True, errors="replace", timeout=seconds, cwd=folder)
    return done.returncode, done.stdout


def check(name, wrong):
    """Reports the result of a check. wrong: a sentence for each error."""
    report("FAILED", name, "; ".join(wrong)) if wrong else report("ok", name)


def blocks(text):
    """Yields (number of the first line, words of the info string, text) for each fenced block."""
    for m in re.finditer(r"^```([^\n]*)\n(.*?)^```\s*$", text, re.M | re.S):
        yield text.count("\n", 0, m.start()) + 1, m.group(1).split(), m.group(2)


def commands(text):
    """Yields the commands in a text, as lists of words: lines of sh blocks, and texts in backticks outside of
    blocks."""
    shown = []
    for _, info, body in blocks(text):
        if info[:1] == ["sh"]:
            shown += re.sub(r"\\\n", " ", body).splitlines()
    prose = re.sub(r"^```.*?^```\s*$", "", text, flags=re.M | re.S)
    shown += re.findall(r"`([^`\n]+)`", prose)
    for line in shown:
        try:
            words = shlex.split(line, comments=True)
        except ValueError:
            continue
        for part in re.split(r"\0(?:&&|\|\||\||;)\0", "\0".join(words)):
            if part:
                yield part.split("\0")


@functools.lru_cache(maxsize=None)
def implementation(lines):
    """Compiles the lines that hold the implementation, once. Returns the path of the object file."""
    source = os.path.join(SHARED.name, f"{implementation.cache_info().misses}.c")
    with open(source, "w") as f:
        f.write(lines)
    status, said = call(*CC, *CFLAGS, "-c", source, "-o", source + ".o")
    check("implementation", [f"status {status}: {said[-500:]}"] if status else [])
    return source + ".o"


def check_snippets(text, name, folder):
    """Builds and runs the programs. Returns the marks of the programs that ran."""
    ran, shown = set(), list(blocks(text))
    for k, (line, info, body) in enumerate(shown):
        if info[:1] != ["c"]:
            continue
        source, program = os.path.join(folder, f"snippet_{line}.c"), os.path.join(folder, f"snippet_{line}")
        mark = " ".join(info[1:])
        if mark not in MARKS:
            check(f"{name}_mark_line_{line}", [f"the mark is '{mark}', expected one of {', '.join(MARKS)}"])
            continue
        ran.add(mark)
        objects = []
        if mark == "part":
            body += next((main for function, main in PARTS.items() if function in body), "")
        if mark == "implementation":
            objects, body = [implementation(body)], USER
        elif mark == "part" or LINES in body: # all programs share one implementation, to compile less
            objects = [implementation(LINES), "-DTT__ELSEWHERE", "-D_GNU_SOURCE"]
        with open(source, "w") as f:
            f.write(body)
        status, said = call(*CC, *CFLAGS, source, *objects, "-o", program, "-lm", "-lpthread")
        if status == 0 and MARKS[mark]:
            MARKS[mark](program, name, folder, line)
        elif status == 0:
            status, said = call(program, folder=None if mark == "part" else folder)
            if shown[k + 1:] and shown[k + 1][1] == ["output"]:
                check(f"{name}_output_line_{line}",
                      [f"it prints {said}"] if said.split() != shown[k + 1][2].split() else [])
        check(f"{name}_snippet_line_{line}", [f"status {status}: {said[-500:]}"] if status else [])
    return ran


def check_resume(program, name, folder, line):
    """Checks that a program prints the same text and leaves the same files without a stop as after a kill and
    a restart."""
    wrong, left = [], []
    for kill in ([], ["115"]):
        place = os.path.join(folder, f"resume_{line}_{len(kill)}")
        os.mkdir(place)
        if kill:
            status, said = call(program, *kill, folder=place)
            if status != -9 or said:
                wrong.append(f"status {status} where it is to be killed: {said[-300:]}")
            if not os.listdir(place):
                wrong.append("no state was saved before it was killed")
        status, said = call(program, folder=place)
        if status:
            wrong.append(f"status {status}: {said[-300:]}")
        files = {}
        for file in sorted(os.listdir(place)):
            with open(os.path.join(place, file), "rb") as f:
                files[file] = f.read()
        left.append((said, files))
    if left[0][0] != left[1][0]:
        wrong.append(f"it prints {left[1][0]!r} when it was killed, else {left[0][0]!r}")
    if not left[0][1] or left[0][1] != left[1][1]:
        wrong.append("the files that it leaves differ when it was killed")
    check(f"{name}_resume_line_{line}", wrong)


def small_model(to, golden="minilm"):
    """Writes the folder of a tiny encoder of tests/golden with a vocabulary. Returns its path."""
    shutil.copytree(os.path.join("tests/golden", golden), to)
    with open(os.path.join(to, "config.json")) as f:
        tokens = json.load(f)["vocab_size"]
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "good", "bad", "film"]
    with open(os.path.join(to, "vocab.txt"), "w") as f:
        f.writelines(word + "\n" for word in words + [f"word{n}" for n in range(tokens - len(words))])
    return to


def check_predict(program, name, folder, line):
    """Checks that a program prints the probability of each class of a text, and names a missing model."""
    model = small_model(os.path.join(folder, f"predict_{line}_model"))
    path, classes = os.path.join(model, "config.json"), ["bad", "good", "neither"]
    with open(path) as f:
        config = json.load(f)
    with open(path, "w") as f:
        json.dump({**config, "id2label": dict(enumerate(classes))}, f)
    status, said = call(program, model, "a good film")
    words = [text.rsplit(" ", 1) for text in said.splitlines()[-len(classes):]] # after a warning: a new head
    wrong = []
    if status or [w[0] for w in words] != classes or not abs(sum(float(w[-1]) for w in words) - 1) <= 1e-3:
        wrong.append(f"status {status}, classes {classes}: {said[-300:]}")
    status, said = call(program, "no-model", "a good film")
    if status != 1 or "no-model" not in said:
        wrong.append(f"a model that is not there is not named: {said[-300:]}")
    check(f"{name}_predict_line_{line}", wrong)


def check_tune(program, name, folder, line):
    """Checks that a program makes a complete model folder, from which it can train again, even if the table
    numbers the classes in another order."""
    table, out, again = (os.path.join(folder, f"tune_{line}{end}") for end in (".csv", "", "_again"))
    with open(table, "w") as f:
        f.write("text,label\n" + "a good film,pos\na bad film,neg\n" * 20)
    small = small_model(os.path.join(folder, f"tune_{line}_model"))
    wrong = []
    for model, to in (small, out), (out, again):
        if model == out and os.path.isdir(out):
            with open(os.path.join(out, "config.json")) as f:
                config = json.load(f)
            config["id2label"] = {"0": "pos", "1": "neg"}
            config["label2id"] = {"pos": 0, "neg": 1}
            with open(os.path.join(out, "config.json"), "w") as f:
                json.dump(config, f)
        status, said = call(program, model, table, to)
        if status or said.count("validation: ") != 3:
            wrong.append(f"status {status}: {said[-300:]}")
        need = {"config.json", "model.safetensors", "state.safetensors", "metrics.csv"}
        if not os.path.isdir(to) or need - set(os.listdir(to)):
            wrong.append(f"'{to}' lacks some of {need}")
            break
        with open(os.path.join(to, "config.json")) as f:
            config = json.load(f)
        if config["id2label"] != ({"0": "neg", "1": "pos"} if to == out else {"0": "pos", "1": "neg"}):
            wrong.append(f"'{to}' has the classes {config['id2label']}")
        with open(os.path.join(to, "config.json"), "w") as f:
            json.dump({**config, "id2label": {"0": "pos", "1": "neg"}, "label2id": {"pos": 0, "neg": 1}}, f)
    status, said = call(program, "no-model", table, again + "2")
    if status != 1 or "no-model" not in said:
        wrong.append(f"a model that is not there is not named: {said[-300:]}")
    check(f"{name}_tune_line_{line}", wrong)


def refuses_no_model(program, *arguments):
    """Returns a sentence if a program does not name a model that is not there."""
    status, said = call(program, "no-model", *arguments)
    return [] if status == 1 and "no-model" in said else [f"a missing model is not named: {said[-300:]}"]


def check_labels(program, name, folder, line):
    """Checks that a program prints the labels that the rows of a table have."""
    table = "examples/data/requests.tsv"
    with open(table) as f:
        rows = [row.split("\t") for row in f.read().splitlines()[1:]]
    labels = sorted({label for row in rows for label in row[1].split(",")} - {""})
    status, said = call(program, small_model(os.path.join(folder, f"labels_{line}_model")), table)
    wrong = refuses_no_model(program, table)
    if status or not labels or said.splitlines()[-len(labels):] != labels: # after a warning: a new head
        wrong.append(f"status {status}, labels {labels}: {said[-300:]}")
    check(f"{name}_labels_line_{line}", wrong)


def check_similar(program, name, folder, line):
    """Checks that the cosine of the embeddings of two texts is 1 only if the texts are equal, and is the same
    in the other order."""
    model = small_model(os.path.join(folder, f"similar_{line}_model"), "heads/embed_mean")
    wrong, cosines = refuses_no_model(program, "a", "b"), []
    for texts in (("a good film", "a good film"), ("a good film", "bad"), ("bad", "a good film")):
        status, said = call(program, model, *texts)
        if status or not re.fullmatch(r"-?\d\.\d{4}\n", said):
            wrong.append(f"status {status} for {texts}: {said[-300:]}")
        else:
            cosines.append(float(said))
    if not wrong and not (cosines[0] == 1 and -1 <= cosines[1] == cosines[2] < 1):
        wrong.append(f"the cosines are {cosines}")
    check(f"{name}_similar_line_{line}", wrong)


def check_pairs(program, name, folder, line):
    """Checks that a program trains embeddings, saves them for sentence-transformers, and prints the recall."""
    model, table = small_model(os.path.join(folder, f"pairs_{line}_model"), "heads/embed_mean"), "pairs.tsv"
    with open(os.path.join(folder, table), "w") as f:
        f.write("text\ttext_pair\tsplit\n")
        f.writelines(f"a word{k} film\tword{k} good\t{'validation' if k % 3 else 'train'}\n" for k in range(27))
    to = os.path.join(folder, f"pairs_{line}_trained")
    status, said = call(program, model, os.path.join(folder, table), to)
    wrong = refuses_no_model(program, "examples/data/questions.tsv", to)
    if status or not re.fullmatch(r"recall_at_10 (0\.\d\d|1\.00)\n", said):
        wrong.append(f"status {status}: {said[-300:]}")
    files = "modules.json", "1_Pooling/config.json", "model.safetensors", "vocab.txt"
    wrong += [f"'{to}' has no {file}" for file in files if not os.path.isfile(os.path.join(to, file))]
    check(f"{name}_pairs_line_{line}", wrong)


def check_words(program, name, folder, line):
    """Checks that a program trains an encoder on masked words, saves it, and prints the perplexity."""
    model = small_model(os.path.join(folder, f"words_{line}_model"), "heads/bert_masked_lm")
    texts, to = os.path.join(folder, "texts.txt"), os.path.join(folder, f"words_{line}_trained")
    with open(texts, "w") as f:
        f.writelines(f"a good film word{k % 9} bad\n\n" for k in range(40))
    status, said = call(program, model, texts, to)
    wrong = refuses_no_model(program, texts, to)
    if status or not re.fullmatch(r"perplexity \d+\.\d\n", said):
        wrong.append(f"status {status}: {said[-300:]}")
    config = os.path.join(to, "config.json")
    if not os.path.isfile(config) or "BertForMaskedLM" not in open(config).read():
        wrong.append(f"'{config}' does not name BertForMaskedLM")
    check(f"{name}_words_line_{line}", wrong)


def check_distill(program, name, folder, line):
    """Checks that a program trains a student of half of the teacher's layers, and saves it."""
    model, table = small_model(os.path.join(folder, f"distill_{line}_model")), os.path.join(folder, "films.csv")
    with open(table, "w") as f:
        f.write("text,label\n" + "a good film,pos\na bad film,neg\n" * 20)
    to = os.path.join(folder, f"distill_{line}_trained")
    status, said = call(program, model, table, to, "0.5")
    wrong = refuses_no_model(program, table, to, "0.5")
    if status or not re.fullmatch(r"loss \d\.\d{3}, accuracy \d\.\d{3}", said.splitlines()[-1]):
        wrong.append(f"status {status}: {said[-300:]}")
    config = os.path.join(to, "config.json")
    if not os.path.isfile(config) or json.load(open(config))["num_hidden_layers"] != 1:
        wrong.append(f"'{config}' does not have 1 layer")
    check(f"{name}_distill_line_{line}", wrong)


def check_continue(program, name, folder, line):
    """Checks that a program continues a text, twice in the same way, with a decoder whose tokens are letters,
    and with a decoder of bytes, which the example gpt makes."""
    letters, octets = (os.path.join(folder, f"continue_{line}_{kind}") for kind in ("letters", "bytes"))
    shutil.copytree("tests/golden/lm/llama", letters)
    with open(os.path.join(letters, "tokenizer.json"), "w") as f:
        vocab = {chr(97 + k) if k < 26 else chr(22 + k): k for k in range(41)} # a to z, 0 to >
        json.dump({"model": {"type": "BPE", "merges": [], "vocab": vocab, "unk_token": "z"},
                   "decoder": {"type": "Fuse"}}, f)
    with open(octets + ".txt", "w") as f:
        f.write("a good film\n" * 50)
    made, why = call(os.path.join(B, "gpt"), "--data", octets + ".txt", "--out", octets, "--layers=1",
                     "--hidden=16", "--heads=2", "--length=128", "--epochs=1")
    wrong = refuses_no_model(program, "a") + ([f"gpt: {why[-300:]}"] if made else [])
    for model, alphabet in (letters, r"[a-z0->]"), (octets, r"."):
        first, second = (call(program, model, "good") for _ in range(2))
        if first[0] or first != second or not re.fullmatch(alphabet + r"+\n", first[1], re.S):
            wrong.append(f"'{model}' gives {first}, then {second}")
    check(f"{name}_continue_line_{line}", wrong)


MARKS = {"run": None, "resume": check_resume, "tune": check_tune, "predict": check_predict,
         "labels": check_labels, "similar": check_similar, "pairs": check_pairs, "words": check_words,
         "distill": check_distill, "continue": check_continue, "implementation": None, "part": None}
# The file that holds the implementation, and a file that uses the implementation.
LINES = '#define TINYTRAIN_IMPLEMENTATION\n#include "tinytrain.h"\n'
USER = """#include "tinytrain.h"
int main(void)
{
    tt_context *ctx = tt_open(NULL);
    const bool opened = ctx;
    tt_close(ctx);
    return !opened;
}
"""
# A main for each function that docs/ shows alone. The main ends with 0 if the function does what the page
# says.
PARTS = {
    # The base is in floats without a budget, and in int8 with a budget of one byte less than that plan.
    "fitting(": """
int main(void)
{
    size_t bytes = 0;
    for (int k = 0; k < 2; k++) {
        tt_context *ctx = tt_open(NULL);
        tt_lm m;
        tt_lm_config c = tt_lm_config_sized("llama", 1, 64, 4);
        tt_train_options o = tt_train_options_default();
        c.vocab_size = 50;
        o.max_seqs = 1, o.max_tokens = 16;
        o.schedule.kind = TT_CONSTANT;
        o.compile.memory_budget = k ? bytes - 1 : 0;
        if (!ctx || tt_lm_new(ctx, &m, &c) != TT_OK || tt_lm_lora(&m, NULL) != TT_OK) return 2;
        const tt_model model = tt_lm_model(&m);
        tt_trainer *t = fitting(&m, &model, &o);
        if (!t || (m.stored != NULL) != k || (k && m.stored[0] != 'i')) return 3;
        bytes = tt_program_plan(tt_trainer_program(t)).bytes;
        tt_trainer_free(t), tt_lm_free(&m), tt_close(ctx);
    }
    return 0;
}
""",
    # The probabilities of two images sum to 1 each and differ.
    "classify_image(": """
int main(void)
{
    static uint8_t pixels[2][30 * 20 * 3];
    float p[2][3] = {{0}};
    tt_context *ctx = tt_open(NULL);
    tt_vit m;
    if (!ctx || tt_vit_load(ctx, &m, "tests/golden/vit", 0, 0) != TT_OK || m.config.classes != 3) return 2;
    const tt_model model = tt_vit_classifier(&m);
    tt_train_options o = tt_train_options_default();
    o.compile.train = false, o.max_seqs = 1;
    tt_trainer *t = tt_trainer_new(ctx, &model, &o);
    for (int k = 0; k < 30 * 20 * 3; k++) pixels[0][k] = (uint8_t)(k * 7), pixels[1][k] = (uint8_t)(k * k);
    bool ok = t;
    for (int k = 0; k < 2 && ok; k++) {
        const tt_image image = {pixels[k], 30, 20, 3};
        ok = classify_image(t, &m, &image, p[k]) == TT_OK;
        const float off = p[k][0] + p[k][1] + p[k][2] - 1;
        if (!(off * off <= 1e-10f)) ok = false;
    }
    tt_trainer_free(t), tt_vit_free(&m), tt_close(ctx);
    return !ok || p[0][0] == p[1][0];
}
""",
    # With equal gradients the updates of SGD are in proportion to the learning rates.
    "set_learning_rates(": """
int main(void)
{
    static const char *const names[] = {"bert.embeddings.word", "bert.layer.0.weight", "classifier.weight"};
    static const double rates[] = {0.1 * 0.9 * 0.9, 0.9, 10};
    const float one = 1, x = 0.5f;
    float w[3];
    tt_param *p[3];
    tt_context *ctx = tt_open(NULL);
    tt_tape *t = tt_tape_new(ctx);
    tt_value in = tt_input(t, "x", TT_F32, 1, 1), sum = {0};
    for (int k = 0; k < 3; k++) {
        p[k] = tt_param_new(ctx, names[k], 2, (int64_t[]){1, 1}, (tt_init){TT_INIT_ONES, 0});
        sum = k ? tt_add(t, sum, tt_linear(t, in, p[k], NULL)) : tt_linear(t, in, p[k], NULL);
    }
    tt_train_options o = tt_train_options_default();
    set_learning_rates(&o);
    o.compile.optimizer.kind = TT_SGD;
    o.compile.optimizer.weight_decay = o.compile.optimizer.clip_norm = 0;
    tt_value loss = tt_mean_squared_error(t, sum, tt_input(t, "y", TT_F32, 1, 1), (tt_value){0});
    tt_input_info inputs[2];
    tt_program *program = tt_compile(t, loss, &o.compile);
    bool ok = program && tt_program_inputs(program, inputs, 2) == 2;
    for (int k = 0; k < 2 && ok; k++) ok = tt_set(program, inputs[k].value, k ? &one : &x, 1) == TT_OK;
    ok = ok && tt_step(program, 0.01f, NULL) == TT_OK; /* gradient of each parameter: 2 (1.5 - 1) 0.5 */
    for (int k = 0; k < 3 && ok; k++) {
        ok = tt_param_get(p[k], &w[k]) == TT_OK;
        const double off = (1 - (double)w[k]) / (0.01 * 0.5 * rates[k]) - 1;
        if (!(off * off <= 1e-6)) ok = false;
    }
    tt_program_free(program), tt_tape_free(t), tt_close(ctx);
    return !ok;
}
""",
    # A BERT keeps 1 of 2 heads and 22 of 44 neurons, and its MLP gets factors.
    "halve(": """
static tt_status seek(void *self, int64_t epoch, int64_t step)
{
    (void)epoch;
    return *(int64_t *)self = step, TT_OK;
}

static tt_status next(void *self, tt_batch *b, bool *more)
{
    static int32_t ids[] = {1, 7, 3, 5}, zeros[4], positions[] = {0, 1, 2, 3}, start[] = {0, 4};
    *more = (*(int64_t *)self)++ == 0;
    b->rows = 4, b->seqs = 1, b->last_of_step = true;
    b->ids = ids, b->types = zeros, b->positions = positions, b->seq_start = start, b->labels = zeros;
    return TT_OK;
}

int main(void)
{
    int64_t at = 0;
    tt_source source = {.self = &at, .seek = seek, .next = next, .steps = 1, .max_seqs = 1, .max_tokens = 4};
    tt_context *ctx = tt_open(NULL);
    tt_bert m;
    bool ok = ctx && tt_bert_load(ctx, &m, "tests/golden/bert", 0) == TT_OK && halve(&m, &source) == TT_OK;
    ok = ok && m.config.heads == 1 && m.config.intermediate_size == 22 && factor(&m.layer[0]) == TT_OK;
    tt_bert_free(&m), tt_close(ctx);
    return !ok;
}
""",
    # One step of SGD on (softsign(w) - 0)^2, from w = 1: the gradient is 2 * 0.5 * 0.25.
    "record_softsign(": """
int main(void)
{
    const float one = 1, zero = 0;
    float w = 0, y = 0;
    tt_context *ctx = tt_open(NULL);
    tt_param *p = tt_param_new(ctx, "w", 2, (int64_t[]){1, 1}, (tt_init){TT_INIT_ONES, 0});
    tt_tape *t = tt_tape_new(ctx);
    tt_value in = tt_input(t, "x", TT_F32, 1, 1), to = tt_input(t, "y", TT_F32, 1, 1);
    tt_value out = record_softsign(t, tt_linear(t, in, p, NULL));
    tt_output(t, out);
    tt_compile_options o = tt_compile_options_default();
    o.optimizer.kind = TT_SGD, o.optimizer.weight_decay = 0;
    tt_program *program = tt_compile(t, tt_mean_squared_error(t, out, to, (tt_value){0}), &o);
    bool ok = program && tt_set(program, in, &one, 1) == TT_OK && tt_set(program, to, &zero, 1) == TT_OK;
    ok = ok && tt_step(program, 0.1f, NULL) == TT_OK && tt_get(program, out, &y, 1) == TT_OK;
    ok = ok && y == 0.5f && tt_param_get(p, &w) == TT_OK && fabsf(w - (1 - 0.1f * 0.25f)) <= 1e-6f;
    tt_program_free(program), tt_tape_free(t), tt_close(ctx);
    return !ok;
}
"""}


def check_manual(folder):
    """Checks that the transformer block in the header's manual compiles."""
    with open("tinytrain.h", encoding="utf-8") as f:
        block = re.search(r"A TRANSFORMER BLOCK.*?\n((?: {9}.*\n)+)", f.read())
    code = block[1] if block else ""
    parameters = ", ".join("*" + name for name in sorted(set(re.findall(r"m->(\w+)", code))))
    source = os.path.join(folder, "block.c")
    with open(source, "w") as f:
        f.write(f'#include "tinytrain.h"\ntypedef struct {{ tt_param {parameters}; }} block;\n'
                "tt_value record(tt_tape *t, const block *m, tt_value x, tt_value starts, int heads);\n"
                "tt_value record(tt_tape *t, const block *m, tt_value x, tt_value starts, int heads)\n"
                f"{{\n{code}    return x;\n}}\n")
    status, said = call(*CC, "-std=c99", "-Wall", "-Wextra", "-Wpedantic", "-Werror", "-I.", "-fsyntax-only",
                        source)
    check("manual_block", [] if status == 0 and code else [f"status {status}: {said[-500:]}"])


def check_makefile(text, name):
    makefile = ""
    for path in ["Makefile"] + glob.glob("*/*.mk") + glob.glob("*/*/*.mk"):
        with open(path) as f:
            makefile += f.read()
    known = set(re.findall(r"\$\((\w+)\)", makefile)) | set(re.findall(r"^(\w+) *[:?+]?=", makefile, re.M))
    targets = {"all"}
    phony = re.findall(r"^\.PHONY:(.*)", makefile, re.M)
    targets |= set(" ".join(phony).split())
    wrong = []
    for words in commands(text):
        if words[0] != "make":
            continue
        for word in words[1:]:
            variable = word.split("=")[0]
            if "=" in word and variable not in known:
                wrong.append(f"the Makefile has no variable {variable} ({' '.join(words)})")
            if "=" not in word and not word.startswith("-") and word not in targets and word.isidentifier():
                wrong.append(f"the Makefile has no target {word} ({' '.join(words)})")
            if "=" not in word and word in targets and call("make", "-n", word)[0]:
                wrong.append(f"make -n {word} fails")
    check(name + "_make_targets", wrong)


def check_flags(text, name):
    wrong, used, helped = [], 0, {}
    for words in commands(text):
        flags = [w.split("=")[0] for w in words[1:] if re.fullmatch(FLAG + "(=.*)?", w)]
        program = next((w for w in words[:2] if re.match(r"(\./)?(build|bench|tests|examples)/", w)), None)
        if not flags or not program:
            continue
        # build/cuda/ has the same programs for a GPU
        path = re.sub(r"^(\./)?build/(cuda/)?", B + "/", program)
        base = os.path.basename(program)
        sources = (f"bench/{base}.c", f"bench/peers/{base}.c", path)
        path = next((p for p in sources if os.path.exists(p)), None)
        if not path:
            wrong.append(f"there is no {program}")
            continue
        if path.endswith((".py", ".c")):
            known = ""
            # Adds the flags that all benches have.
            for file in [path] + ["bench/bench.h"] * path.endswith(".c"):
                with open(file) as f:
                    known += f.read()
        else:
            known = helped.setdefault(path, call(path, "--help")[1])
        for flag in flags:
            used += 1
            if not re.search(re.escape(flag) + r"(?![a-z0-9-])", known):
                wrong.append(f"{program} has no {flag}")
    needs = name in ("readme", "bench_readme")
    check(name + "_flags", wrong if used or not needs else ["no command with a flag was found"])


def check_help(program):
    """Checks that a program's parser accepts each flag of its --help, with a value if the help shows one, as
    `--flag value` and as `--flag=value`, also before a last --help. Checks that -h equals --help."""
    name = os.path.basename(program)
    status, said = call(program, "--help")
    wrong = [] if status == 0 else [f"--help ends with {status}"]
    if call(program, "-h") != (status, said):
        wrong.append("-h is not what --help is")
    entries = re.findall(rf"^  ({FLAG})(?: ([A-Z]+))?\b(.*(?:\n {{8,}}.*)*)", said, re.M)
    for flag, value, text in entries:
        # matches "...: one, two or three (two)" and "...: one or two"
        choices = re.search(r": ([^\s,]+)(?:, [^\s,]+)* or \S+(?: \(\S+\))?$", " ".join(text.split()))
        good = choices.group(1) if choices else "1"
        for given in ([flag, good], [f"{flag}={good}"]) if value else ([flag], [f"{flag}=false"]):
            status, said = call(program, *given, "--help")
            if status:
                wrong.append(f"{flag} is in --help but {' '.join(given)} is refused: {said}")
        if value and not call(program, flag)[0]:
            wrong.append(f"{flag} without its value is taken")
        if choices and not call(program, flag, "no-such-choice", "--help")[0]:
            wrong.append(f"{flag} takes what is none of its choices")
    status, said = call(program, "--no-such-flag", "--help")
    if status == 0 or "--no-such-flag" not in said:
        wrong.append("an unknown flag is not refused by name")
    if max(map(len, call(program, "--help")[1].splitlines())) > 80:
        wrong.append("--help has lines of more than 80 columns where there is no terminal")
    check(f"help_{name}_{len(entries)}_flags", wrong if entries else ["--help names no flag"])


def check_lone_flags(text, name):
    """Checks that each flag shown without a program, such as `--zero 3`, is in the --help of an example."""
    known = set()
    for file in glob.glob("examples/*.c"):
        program = os.path.join(B, os.path.basename(file)[:-2])
        if os.path.exists(program) and not program.endswith("hello"): # hello has no flags
            known |= set(re.findall(FLAG, call(program, "--help")[1]))
    flags = {w.split("=")[0] for words in commands(text) if words[0].startswith("--")
             for w in words if re.fullmatch(FLAG + "(=.*)?", w)}
    check(name + "_lone_flags", [f"no example has {flag}" for flag in sorted(flags - known - OF_OTHERS)])


def anchors(path):
    """Returns the anchors that GitHub makes of a file's headings."""
    with open(path, encoding="utf-8") as f:
        prose = re.sub(r"^```.*?^```\s*$", "", f.read(), flags=re.M | re.S)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
            for heading in re.findall(r"^#+ +(.*?) *$", prose, re.M)}


def check_links(text, path, name):
    wrong, folder = [], os.path.dirname(path)
    for to, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]*))?[^)]*\)", text):
        target = os.path.normpath(os.path.join(folder, to)) if to else path
        if re.match(r"[a-z]+:", to):
            continue
        if not os.path.exists(target):
            wrong.append(f"'{to}' is not there")
        elif anchor and (not target.endswith(".md") or anchor not in anchors(target)):
            wrong.append(f"'{target}' has no heading '#{anchor}'")
    check(name + "_links", wrong)


def check_pages(readme):
    """Checks that README.md links to each page, and that the pages' lines of text are not too long."""
    linked = set(re.findall(r"\]\((docs/[^)#\s]+)", readme))
    check("docs_linked", [f"README.md has no link to {page}" for page in PAGES if page not in linked])
    wrong = []
    for page in PAGES:
        with open(page, encoding="utf-8") as f:
            prose = re.sub(r"^```.*?^```\s*$", lambda m: "\n" * m[0].count("\n"), f.read(), flags=re.M | re.S)
        wrong += [f"{page}, line {n}: {len(line)} columns" for n, line in enumerate(prose.splitlines(), 1)
                  if len(line) > 110 and not line.startswith(("|", "!["))]
    check("docs_columns", wrong)


def main():
    ran = set()
    pages = [(page, "docs_" + os.path.basename(page)[:-3].replace("-", "_")) for page in PAGES]
    for path, name in [("README.md", "readme"), *pages, ("bench/README.md", "bench_readme"),
                       ("CONTRIBUTING.md", "contributing")]:
        if not os.path.exists(path):
            report("FAILED", name, f"{path} is not there")
            continue
        with open(path, encoding="utf-8") as f:
            text = f.read()
        with tempfile.TemporaryDirectory() as folder:
            ran |= check_snippets(text, name, folder)
        check_makefile(text, name)
        check_flags(text, name)
        check_links(text, path, name)
        if path in ["README.md", *PAGES]:
            check_lone_flags(text, name)
        if path == "README.md":
            check_pages(text)
    check("programs_of_each_mark", [f"no program is marked ```c {mark}" for mark in MARKS if mark not in ran])
    with tempfile.TemporaryDirectory() as folder:
        check_manual(folder)
    for file in sorted(os.listdir("examples")):
        if file.endswith(".c") and file != "hello.c": # hello.c has no flags
            program = os.path.join(B, file[:-2])
            check_help(program) if os.path.exists(program) else report("FAILED", f"help_{file[:-2]}",
                                                                       f"{program} is not built")
    print(f"{counts['skip']} skipped: {counts['ok']} passed, {counts['FAILED']} failed")
    return 1 if counts["FAILED"] else 0


if __name__ == "__main__":
    sys.exit(main())
