#!/usr/bin/env python3
"""Checks the behaviour of the examples: options, exit statuses, signals, folders. Standard library
only; run from the repository's root; B: folder of the built examples (build), from the environment.
"""
import base64
import csv
import fcntl
import functools
import json
import os
import pty
import random
import re
import resource
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import termios
import time

B = os.path.abspath(os.environ.get("B", "build"))
TEXT, IMAGES, GPT, HELLO = (os.path.join(B, name) for name in ("distilbert_imdb", "vit_l16", "gpt", "hello"))
counts = {"ok": 0, "FAILED": 0}
checks = []


def check(function):
    checks.append(function)
    return function


class Wrong(Exception):
    pass


def expect(right, *what):
    if not right:
        raise Wrong(" ".join(str(w) for w in what)[-800:])


def call(*command, folder=None, seconds=300):
    """Runs a command. Returns (exit status, stdout, stderr)."""
    done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                          text=True, errors="replace", timeout=seconds, cwd=folder)
    return done.returncode, done.stdout, done.stderr


def refused(*command, saying, folder=None):
    status, out, err = call(*command, folder=folder)
    name = os.path.basename(command[0])
    expect(status == 1, "status", status, "and not 1 of", command, out, err)
    expect(err.startswith(name + ": ") and saying in err, "not", repr(saying), "but", err)


def write_table(path, rows):
    with open(path, "w", newline="") as f:
        csv.writer(f).writerows(rows)


EVERYTHING = "optimizer,gradients,parameters,activations"   # for --offload
WORDS = ["good", "great", "fine", "bad", "dull", "awful"]


def small_table(path, texts=60, words=5, splits=None):
    """Writes a table of texts of `words` words in two classes. Returns its path."""
    rows = [["text", "label"] + ["split"] * bool(splits)]
    for k in range(texts):
        text = " ".join(WORDS[k % 2 * 3 + (k + w) % 3] for w in range(words))
        rows.append([text, "up" if k % 2 == 0 else "down"] + ([splits[k % len(splits)]] if splits else []))
    write_table(path, rows)
    return path


def planned(*options, program=TEXT):
    """Returns the megabytes that --plan prints, and its whole output."""
    status, out, err = call(program, *options, "--plan")
    expect(status == 0, err)
    return float(re.search(r"memory plan for .*: [a-z ]*([\d.]+) MB", out).group(1)), out


@check
def wrong_options_are_named(folder):
    refused(TEXT, "--lrr=3", saying="there is no option '--lrr=3'; did you mean --lr?")
    refused(TEXT, "--optimiser", "adam", saying="did you mean --optimizer?")
    refused(TEXT, "stop", saying="there is no option 'stop'")
    refused(TEXT, "--learning-rate", "1e-4", saying="did you mean --lr?")
    refused(IMAGES, "--per_device_train_batch_size=8", saying="did you mean --batch?")
    refused(IMAGES, "--max-seq-length=8", saying="there is no option '--max-seq-length=8'; --help lists all")
    refused(TEXT, "--optimizer=adagrad", saying="--optimizer must be sgd, adam, adamw, lion, muon or adafactor, not 'adagrad'")
    refused(TEXT, "--lr=fast", saying="--lr must be a number, not 'fast'")
    refused(TEXT, "--lr=nan", saying="--lr must be a number from 0 to")
    refused(TEXT, "--epochs", "1.5", saying="--epochs must be a whole number, not '1.5'")
    refused(TEXT, "--warmup=2", saying="--warmup must be a number from 0 to 1, not 2")
    refused(TEXT, "--out", "--plan",
            saying="'--plan' looks like an option; if it is the value, write --out=--plan")
    refused(TEXT, "--delimiter=ab", saying="--delimiter must be one character")
    refused(TEXT, "--data=/dev/null",
            saying="cannot open '/dev/null': it is a pipe or a device; expected a regular file")
    refused(TEXT, "--budget=3G", saying="--budget must be a number of bytes, such as 3GB or 500MiB, not '3G'")
    refused(TEXT, "--plan", "--offload=optimizer,params",
            saying="--offload params is unknown: use none or budget")
    for program in TEXT, IMAGES:
        refused(program, "--threads", "1000", saying="--threads must be a number from 0 to 256, not 1000")
        refused(program, "--out", "a" * 1200, saying="--out has 1200 characters, but must have 1 to 1000")
        refused(program, "--out=", saying="--out has 0 characters")
        for seconds in "0", "-1", "nan", "2e6":
            refused(program, "--timeout", seconds,
                    saying="--timeout must be a number from 0.1 to 1e+06, not " + seconds)


@check
def ranks_that_cannot_share_the_work_are_refused(folder):
    for program in TEXT, IMAGES:
        def wrong(*options, saying):
            refused(program, "--plan", "--out", os.path.join(folder, "plan"), *options, saying=saying)
        wrong("--zero=4", saying="--zero must be 0, 1, 2, 3 or budget, not '4'")
        wrong("--tensor=0", saying="--tensor must be a number from 1 to 64, not 0")
        wrong("--groups=-1", saying="--groups must be a number from 0 to 64, not -1")
        wrong("--data-ranks=65", saying="--data-ranks must be a number from 0 to 64, not 65")
        wrong("--tensr=2", saying="did you mean --tensor?")
        wrong("--device=", saying="--device has 0 characters")
        wrong("--device=gpu*2", saying="--device gpu*2 is unknown")
        wrong("--device=cpu*0", saying="--device cpu*0")
        wrong("--device=cpu", "--tensor=2",
              saying="--device cpu has 1 rank, but --data-ranks 1 x --tensor 2 need 2")
        wrong("--device=cpu*4", "--data-ranks=3", saying="--data-ranks 3 x --tensor 1 need 3")
        wrong("--device=cpu*3", "--groups=4", saying="--groups 4 is not a multiple of the 3 data ranks")
        wrong("--device=cpu*2", "--server", "--zero=2",
              saying="--server keeps whole gradients and parameters: use --zero 0 or 1")
        wrong("--device=cpu*2", "--sequence", saying="--sequence needs --tensor 2 or more")
        wrong("--device=cpu*8", "--batch=4", saying="set --batch to at least 8")
        wrong("--device=cpu*2", "--pipeline=3",
              saying="--data-ranks 1 x --tensor 1 x --pipeline 3 need 3")
        wrong("--device=cpu*2", "--pipeline=2", "--zero=3",
              saying="--pipeline 2 does not go with --zero 2 and 3: use --zero 0 or 1")
        for name in "--stages=gpipe", "--schedule=gpipe":
            wrong("--device=cpu*2", "--pipeline=2", name, saying="--stages gpipe needs --micros")
        wrong("--stages=linear", saying="--stages must be 1f1b or gpipe, not 'linear'")
        wrong("--schedule", "step", saying="--schedule must be constant, linear, cosine, wsd or wsd-sqrt, not 'step'")


@check
def plan_is_by_the_longest_text(folder):
    """Checks the plans for texts of 7 tokens, for longer texts, and for longer texts cut to 7 tokens."""
    table = small_table(os.path.join(folder, "short.csv"))
    long = small_table(os.path.join(folder, "long.csv"), words=120)
    out = "--out=" + os.path.join(folder, "plan")
    short, said = planned("--data", table, out, "--batch=16")
    expect("the longest has 7 tokens; none is cut" in said, said)
    more, said = planned("--data", long, out, "--batch=16")
    expect("the longest has 122 tokens; none is cut" in said, said)
    expect(more > short + 3, short, "MB for short texts,", more, "for long ones")
    cut, said = planned("--data", long, out, "--batch=16", "--max-length=7")
    expect("60 of 60 are cut" in re.sub(r"(\d+) of \1", "60 of 60", said), said)
    expect(cut == short, short, "MB for short texts,", cut, "for those that are cut")


@check
def budget_in_units(folder):
    table = small_table(os.path.join(folder, "t.csv"))
    options = [TEXT, "--data", table, "--plan", "--out", os.path.join(folder, "plan")]
    for budget in "1MB", "1000 kB", "1000000", "0.001GB", "1e6B":
        refused(*options, "--budget", budget, saying="--budget is 1000000 bytes, but")
    refused(*options, "--budget=1.2MiB", saying="--budget is 1258291 bytes, but")
    refused(*options, "--budget=1MB", "--device=cuda", saying="the plan needs")
    expect(call(*options, "--budget=1 TB")[0] == 0)


@check
def optimizer_schedule_and_recompute(folder):
    table = small_table(os.path.join(folder, "t.csv"))
    out = "--out=" + os.path.join(folder, "plan")
    adam, sgd = planned("--data", table, out)[0], planned("--data", table, out, "--optimizer", "sgd")[0]
    expect(sgd < 0.7 * adam, "SGD plans", sgd, "MB, AdamW", adam)
    run = os.path.join(folder, "run")
    status, _, err = call(TEXT, "--data", table, "--out", run, "--schedule=constant", "--recompute=blocks",
                          "--warmup=0", "--epochs=1", "--lr=0.001")
    expect(status == 0, err)
    with open(os.path.join(run, "metrics.csv")) as f:
        rates = {row["lr"] for row in csv.DictReader(f) if row["split"] == "train"}
    expect(rates == {"0.001"} or {float(r) for r in rates} == {0.001}, "constant rates are", rates)
    models = []
    for k, rules in enumerate((None, "*=1", "*.layer.0.*=0.1,*classifier*=10", "*.layer.0.*=0.1,layer=2,*=1")):
        status, out, err = call(TEXT, "--data", table, "--out", run + str(k), "--epochs=1",
                                *(["--lr-rules", rules] if rules else []))
        expect(status == 0 and ("'layer' of lr_rules: check its spelling" in err) == (k == 3), err)
        models.append(contents(run + str(k), "model.safetensors"))
    expect(models[0] == models[1] and len(set(models)) == 3, "--lr-rules")
    refused(TEXT, "--lr-rules=*.bias", "--out", run + "4",
            saying="--lr-rules must be a list such as NAME=2,NAME=0.5, not '*.bias'")


@check
def offload_saves_memory_of_the_device(folder):
    options = ["--out", os.path.join(folder, "plan"), "--device=cuda"]
    whole, said = planned(*options)
    expect("on the host" not in said, said)
    less, said = planned(*options, "--offload=optimizer")
    host = re.search(r"on the host: ([\d.]+) MB; copied to and from it per step: ([\d.]+) MB", said)
    expect(host, "no bytes of the host in", said)
    expect(less < whole - 1 and float(host[2]) > float(host[1]) > 1, "of", whole, "MB", less, "stay:", said)
    by_host, said = planned(*options, "--update=host")
    expect(re.search(r"generic rates: [\d.]+ ms of computation \([\d.]+ by the host's processor\)", said),
           said)
    fewer = re.search(r"copied to and from it per step: ([\d.]+) MB", said)
    expect(by_host <= less and float(fewer[1]) < float(host[2]), by_host, "MB stay with updates there:", said)
    with open(os.path.join(folder, "plan", "plan.svg")) as f:
        expect("copied per step" in f.read(), "the picture does not show what is copied")


@check
def rates_are_measured(folder):
    """Checks that --measure makes the plan name the seconds of a step and of each further micro-batch."""
    options = ["--out", os.path.join(folder, "plan"), "--accumulate=2"]
    _, said = planned(*options)
    expect("ms of computation" not in said, said)
    _, said = planned(*options, "--measure")
    expect(re.search(r"by the given rates: [\d.]+ ms .* ms for each further micro-batch", said), said)


@check
def update_in_the_backward_saves_memory(folder):
    out = "--out=" + os.path.join(folder, "plan")
    refused(IMAGES, "--plan", out, "--update=backward",
            saying="--update backward does not go with --clip 1")
    end, backward = (planned(out, "--batch=2", "--clip=0", "--update=" + update, program=IMAGES)[0]
                     for update in ("end", "backward"))
    expect(backward < end - 1, end, "MB with updates at the end,", backward, "in the backward")


@check
def options_make_a_budget_fit(folder):
    """Checks that "budget" options make plans fit: the small ViT in 0.5 MB less than without the option, and
    ViT-Ti/16 on two ranks in 3 MB less than with zero 1."""
    options = ["--out=" + os.path.join(folder, "plan")]
    for option in "--recompute=budget", "--offload=budget", "--zero=budget":
        refused(IMAGES, "--plan", *options, option,
                saying=option.replace("=", " ") + " chooses what fits --budget, which is not set")
    refused(IMAGES, "--plan", *options, "--offload=optimizer,budget", saying="use none or budget alone")
    for device, named in ("cpu", "recompute"), ("cuda", "offload"):
        on = [*options, "--device=" + device]
        by_hand = ["--recompute=cheap", "--offload=none"]
        whole, said = planned(*on, *by_hand, "--budget=1TB", program=IMAGES)
        beside = re.search(r"--budget also counts ([\d.]+) MB that are in use beside the plan", said)
        expect(bool(beside) == (device == "cpu"), said)
        budget = whole - 0.8 + float(beside[1]) if beside else whole - 0.5
        less = [*on, f"--budget={budget:.1f}MB"]
        refused(IMAGES, "--plan", *less, *by_hand, saying="the plan needs")
        for option in [], by_hand[:1] if device == "cuda" else by_hand[1:]:
            planned_mb, said = planned(*less, *option, program=IMAGES)
            chosen = re.search(rf"chosen for memory_budget .* MB:.* {named} (\w+)", said)
            expect(chosen and (option == [] or chosen[1] not in ("none", "nothing")), said)
            expect(planned_mb <= whole - 0.2, whole, "MB and", planned_mb) # `beside` varies
    options += ["--device=cuda*2", "--vit=Ti/16", *by_hand]
    whole = planned(*options, program=IMAGES)[0]
    # A plan first saves the memory for the inputs of the next step, 1.5 MB. To save 3 MB, zero must change,
    # too.
    less = [*options, f"--budget={whole - 3:.1f}MB", "--zero=budget"]
    refused(IMAGES, "--plan", *less, "--server", saying="--server keeps whole gradients")
    refused(IMAGES, "--plan", *less, "--pipeline=2", saying="with --zero budget: use --zero 0 or 1")
    planned_mb, said = planned(*less, program=IMAGES)
    expect(planned_mb <= round(whole - 3, 1) and re.search(r"chosen for .*: zero [23]", said), said)


@check
def the_largest_batch_of_a_budget(folder):
    """Checks that --batch max finds the largest batch that fits a budget, and trains with it."""
    plan = "--out=" + os.path.join(folder, "plan")
    table = small_table(os.path.join(folder, "t.csv"), texts=200)
    for program, data in (TEXT, ["--data", table]), (IMAGES, ["--train=100", "--test=20"]):
        refused(program, plan, "--plan", *data, "--batch=most",
                saying="--batch must be a whole number or max, not 'most'")
        refused(program, plan, "--plan", *data, "--device=cpu", "--batch=max",
                saying="depends on --budget, which is not set")
        refused(program, plan, "--plan", *data, "--batch=max", "--budget=1MB", "--device=cuda",
                saying="--batch max: the plan needs")
        for device in "cpu", "cuda":
            options = [plan, *data, "--device=" + device, "--accumulate=2", "--recompute=cheap",
                       "--offload=none"]
            few, many = (14, 18) if device == "cuda" else (40, 80)
            less = planned(*options, f"--batch={few}", program=program)[0]
            most, said = planned(*options, f"--batch={many}", "--budget=1TB", program=program)
            beside = re.search(r"--budget also counts ([\d.]+) MB", said) # the figure varies with time
            more = float(beside[1]) if beside else 0
            options.append(f"--budget={(less + most) / 2 + more:.1f}MB")
            _, said = planned(*options, "--batch=max", program=program)
            found = re.search(r"^--batch max: (\d+) in a step, in micro-batches of (\d+)$", said, re.M)
            expect(found, "no largest batch in", said)
            step, micro = map(int, found.groups())
            expect(step == 2 * micro and few <= step < many, "batch", step, "as 2 x", micro, "in", options)
            if device == "cpu":
                refused(program, "--plan", *options, f"--batch={2 * many}", saying="the plan needs")
            else:
                planned(*options, f"--batch={step}", program=program)
        run = os.path.join(folder, os.path.basename(program))
        status, said, err = call(program, "--out", run, *data, "--epochs=1", "--batch=max",
                                 f"--budget={most + 20:.1f}MB", "--device=cpu", "--threads=1")
        expect(status == 0 and "best epoch: accuracy" in said, said, err)
        _, said = planned(plan, *data, "--batch=max", "--budget=1TB", program=program)
        expect(", because there are no more examples" in said, said)
    refused(TEXT, "--plan", "--batch=max", "--max-tokens=1000", "--budget=1GB",
            saying="--max-tokens cannot be combined with --batch max")


@check
def columns_and_delimiter(folder):
    path = os.path.join(folder, "odd.txt")
    with open(path, "w") as f:
        f.write("kind|body\n" + "".join(f"{'xy'[k % 2]}|{WORDS[k % 6]} film\n" for k in range(40)))
    refused(TEXT, "--data", path, "--delimiter=|", "--plan",
            saying="is named 'text'; they are 'kind', 'body'")
    _, said = planned("--data", path, "--delimiter=|", "--text-column", "body", "--label-column=kind",
                      "--out", os.path.join(folder, "plan"))
    expect("32 texts to train on, 4 for validation" in said, said)
    path = os.path.join(folder, "glue.tsv")
    with open(path, "w") as f:
        f.write("text\tlabel\n" + "".join(f'"{WORDS[k % 6]}" film\t{"xy"[k % 2]}\n' for k in range(40)))
    refused(TEXT, "--data", path, "--plan", saying="set unquoted (--quote none)")
    _, said = planned("--data", path, "--quote=none", "--out", os.path.join(folder, "plan"))
    expect("32 texts to train on, 4 for validation" in said, said)


@check
def validation_rows_are_the_validation_set(folder):
    splits = ["train", "train", "train", "train", "dev", "valid", "test", "test"]
    table = small_table(os.path.join(folder, "t.csv"), splits=splits)
    status, out, err = call(TEXT, "--data", table, "--epochs=1", "--out", os.path.join(folder, "run"))
    expect(status == 0, err)
    expect("32 texts to train on, 14 for validation" in out and "on 14 test texts" in out, out)
    table = small_table(os.path.join(folder, "u.csv"), splits=["train", "train", "unknown", "test"])
    refused(TEXT, "--data", table, "--plan",
            saying="line 4: the split is 'unknown'; expected train, validation")
    table = small_table(os.path.join(folder, "v.csv"), splits=["train", "train", "val", "val"])
    status, out, err = call(TEXT, "--data", table, "--epochs=1", "--out", os.path.join(folder, "run2"))
    expect(status == 0 and "has no rows to test on" in out and "saved:" in out, out, err)


def changed_model(source, target, change):
    """Copies a model folder. change(tensors, config) edits the copy; tensors: {name: (description, bytes)}.
    Returns the copy's path."""
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("state.*", "metrics.csv"))
    path = os.path.join(target, "model.safetensors")
    with open(path, "rb") as f:
        header = json.loads(f.read(struct.unpack("<Q", f.read(8))[0]))
        data = f.read()
    config = json.loads(contents(target, "config.json"))
    tensors = {name: (t, data[slice(*t["data_offsets"])]) for name, t in header.items() if "dtype" in t}
    change(tensors, config)
    header, data = {}, b""
    for name, (tensor, own) in tensors.items():
        header[name] = {**tensor, "data_offsets": [len(data), len(data) + len(own)]}
        data += own
    with open(path, "wb") as f:
        text = json.dumps(header).encode()
        f.write(struct.pack("<Q", len(text)) + text + data)
    with open(os.path.join(target, "config.json"), "w") as f:
        json.dump(config, f)
    return target


def classes_the_other_way_round(tensors, config):
    for name, (tensor, data) in list(tensors.items()):
        if name.startswith("classifier."):
            half = len(data) // 2
            tensors[name] = tensor, data[half:] + data[:half]
    names = config["id2label"]
    config["id2label"] = {"0": names["1"], "1": names["0"]}
    config["label2id"] = {names["1"]: 0, names["0"]: 1}


@check
def a_model_keeps_the_numbers_of_its_classes(folder):
    """Checks that training a saved model again keeps the numbers of its classes, so that the accuracy in
    validation and test stays the same. If the data has other classes, a message must say so."""
    def path(name):
        return os.path.join(folder, name)
    table = small_table(path("t.csv"), texts=160)
    status, out, err = call(TEXT, "--data", table, "--out", path("run"), "--epochs=12", "--batch=8")
    expect(status == 0 and "best epoch: accuracy 1.0000" in out, out, err)
    expect(re.search("the largest class, '(up|down)', has 0[.][567][0-9]+ of them; F1 is 1.0000 on average, "
                     "down: 1.0000, up: 1.0000\n", out), out)
    done = subprocess.run([TEXT, "--out", path("run"), "--predict", "-"], input=b"a film\ncaf\xe9\n",
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    expect(done.returncode == 1 and b"'text 2 of standard input', line 1, byte 3" in done.stderr and
           done.stdout.count(b"\n") == 1, done.stdout, done.stderr)
    turned = changed_model(path("run"), path("turned"), classes_the_other_way_round)
    status, out, err = call(TEXT, "--data", table, "--model", turned, "--out", path("more"), "--epochs=1",
                            "--lr=1e-12")
    expect(status == 0 and "best epoch: accuracy 1.0000" in out and not err, out, err)
    expect("validation: loss 0.0" in out, out)
    expect(json.loads(contents(path("more"), "config.json"))["id2label"] == {"0": "up", "1": "down"})
    status, out, err = call(TEXT, "--out", path("more"), "--predict", "good great fine good great")
    expect(status == 0 and out.startswith("up\t"), out, err)

    def other_names(tensors, config):
        config["id2label"] = {"0": "down", "1": "UP"}
    other = changed_model(path("run"), path("other"), other_names)
    status, out, err = call(TEXT, "--data", table, "--model", other, "--out", path("named"), "--epochs=1")
    expect(status == 0 and "the model's classes are 'down', 'UP'; those of the data are 'down', 'up'"
           in err, out, err)


@check
def a_model_without_a_classifier_does_not_predict(folder):
    """Checks that --predict refuses a model that lacks some tensors. Training must name the new tensors."""
    def lacks(*names):
        def change(tensors, config):
            for name in names:
                del tensors[name]
        return change
    table = small_table(os.path.join(folder, "t.csv"))
    for program, data, of in ((TEXT, ["--data", table], ["classifier.weight", "classifier.bias"]),
                              (TEXT, ["--data", table], ["pre_classifier.bias"]),
                              (IMAGES, ["--train=40", "--test=20"], ["classifier.weight"])):
        run = os.path.join(folder, os.path.basename(program))
        if not os.path.exists(run):
            status, out, err = call(program, *data, "--epochs=1", "--out", run)
            expect(status == 0 and "note: " in out and " steps are few" in out, out, err)
        without = changed_model(run, f"{run}_{of[0]}", lacks(*of))
        status, out, err = call(program, "--out", without, "--predict", "good")
        refused_to = "holds a model whose classifier is not trained, so it cannot --predict"
        expect(status == 1 and refused_to in err, out, err)
        expect("has no " + ", ".join(f"'{name}'" for name in of) + ": these start with new values" in err,
               err)
        status, out, err = call(program, *data, "--epochs=1", "--model", without, "--out", without + "_more")
        expect(status == 0 and "these start with new values" in err, out, err)


@check
def classes_are_shown_and_odd_ones_told_of(folder):
    path = os.path.join(folder, "t.csv")
    plan = ["--data", path, "--plan", "--out", os.path.join(folder, "plan")]

    def said(*labels):
        write_table(path, [["text", "label", "split"]] +
                    [[f"film {k}", label, "train"] for k, label in enumerate(labels)] +
                    [["good", labels[0], "validation"], ["bad", labels[0], "test"]])
        status, out, err = call(TEXT, *plan)
        expect(status == 0, out, err)
        line = re.search(r"^classes: (.*)$", out, re.M)
        expect(line, "no classes in", out)
        return line[1], re.findall(r"^note: (.*)$", out, re.M)
    expect(said(*["pos"] * 4, *["neg"] * 5) == ("neg: 5, pos: 4", []), said(*["pos"] * 4, *["neg"] * 5))
    line, notes = said(*["10", "9", "-1"] * 3)
    expect(line == "-1: 3, 9: 3, 10: 3" and not notes, line, notes)
    line, notes = said(*["pos", "pos ", "neg"] * 3)
    expect(line == "neg: 3, pos: 3, pos : 3" and notes == ["the classes 'pos' and 'pos ' have similar "
                                                           "names: are they one class?"], notes)
    _, notes = said(*["1", "1.0", "2"] * 3)
    expect(notes == ["the classes '1' and '1.0' have similar names: are they one class?"], notes)
    _, notes = said(*["pos", "neg"] * 4, "odd")
    expect(notes == ["the class 'odd' has at most one of the texts to train on, which is too few to learn "
                     "from"],
           notes)
    _, notes = said(*["pos"] * 57, *["neg"] * 3)
    expect(notes == ["95.0% of the texts are 'pos': a model that always gives this answer is right as often"],
           notes)
    line, notes = said(*[f"id{k:02d}" for k in range(30)])
    expect(line.endswith("id09: 1 and 20 others") and
           notes == ["there are 30 classes for 30 texts: is this the column or folder of the labels?"], line,
    notes)
    photos = os.path.join(folder, "photos")
    for name in "train/10", "train/9", "test/9", "test/10", "test/11":
        for k in range(6):
            picture(os.path.join(photos, name, f"{k}.ppm"), k)
    options = [IMAGES, "--data", photos, *plan[2:], "--size=16"]
    refused(*options, saying=f"'{photos}' has 3 classes to test on, but must have 2, as many as")
    shutil.rmtree(os.path.join(photos, "test/9"))
    refused(*options, saying=f"'{photos}' has a class '11' to test on, which is not one of those to train on")
    os.rename(os.path.join(photos, "test/11"), os.path.join(photos, "test/9"))
    status, out, err = call(*options)
    expect(status == 0 and "\nclasses: 9: 5, 10: 5\n" in out, out, err)


@check
def losses_of_classifiers(folder):
    """Checks that class weights and label smoothing change the result, that two ranks give equal results, and
    that --best-by chooses the best epoch."""
    def path(name):
        return os.path.join(folder, name)
    table = path("t.csv")
    write_table(table, [["text", "label"]] + [[WORDS[k % 6] + " film", "up" if k % 6 else "down"]
                                              for k in range(120)])
    def trained(name, *options, program=TEXT, data=("--data", table)):
        status, out, err = call(program, *data, "--epochs=1", "--groups=2", "--out", path(name), *options)
        expect(status == 0 and not err and "best epoch: accuracy" in out, name, out, err)
        return contents(path(name), "model.safetensors")
    refused(TEXT, "--data", table, "--label-smoothing=1", saying="--label-smoothing is 1, but must be 0 or "
            "more and below 1")
    refused(TEXT, "--data", table, "--best-by=f1", saying="--best-by must be accuracy, f1_macro, f1_micro, "
            "f1_entities, pearson, spearman, recall_at_1, recall_at_10, perplexity or loss, not 'f1'")
    models = [trained("plain"), trained("weighted", "--class-weights=balanced"),
              trained("smooth", "--label-smoothing=0.1"),
              trained("both", "--class-weights=balanced", "--label-smoothing=0.1")]
    expect(len(set(models)) == 4, "the options change nothing")
    for same in "up=1,down=1", "up=1":
        expect(trained("same" + same, "--class-weights=" + same) == models[0], "weights of 1 change something")
    expect(trained("own", "--class-weights=down=3,up=0.5") not in models, "weights of one's own change nothing")
    for weights, why in (("down", "not 'down'"), ("down=-1", "not 'down=-1'"), ("up=1,=2", "not '=2'"),
                         ("dawn=2", "names 'dawn', but must name classes of the data, such as 'down'")):
        refused(TEXT, "--data", table, "--class-weights=" + weights, "--out", path("no"), saying=why)
    refused(TEXT, "--task=scores", "--class-weights=balanced", "--out", path("no"),
            saying="--class-weights is for classes, but --task scores has none")
    for task, weights in ("labels", "damage=3"), ("tags", "B-PERSON=3"), ("tags", "balanced"):
        for w in "none", weights:
            status, out, err = call(TEXT, "--task=" + task, "--epochs=1", "--class-weights=" + w, "--out",
                                    path(task + weights + w))
            expect(status == 0, out, err)
        expect(contents(path(task + weights + "none"), "model.safetensors") !=
               contents(path(task + weights + weights), "model.safetensors"), "weights change nothing of", task)
    ranks = trained("ranks", "--class-weights=balanced", "--label-smoothing=0.1", "--device=cpu*2")
    expect(ranks == models[3], "two ranks train something else")
    trained("images", "--class-weights=balanced", "--label-smoothing=0.1", "--best-by=loss", program=IMAGES,
            data=("--train=40", "--test=20"))
    trained("loss", "--best-by=loss")
    again = (TEXT, "--data", table, "--groups=2", "--epochs=2", "--out", path("loss"), "--resume")
    status, out, err = call(*again)
    expect(status == 1 and "was chosen by its loss, not by its accuracy" in err, out, err)
    status, out, err = call(*again, "--best-by=loss")
    expect(status == 0, out, err)


def metrics_of_test(out):
    """Returns the metrics that the test of the best epoch prints."""
    line = re.search("\nbest epoch: (.*) on ([0-9]+) test texts\n", out).group(1)
    return {name: float(value) for name, value in (part.split() for part in line.split(", "))}


@check
def several_labels(folder):
    run, table = os.path.join(folder, "run"), os.path.join(folder, "t.csv")
    status, out, err = call(TEXT, "--task=labels", "--epochs=30", "--lr=1e-3", "--out", run)
    metrics = metrics_of_test(out)
    expect(status == 0 and list(metrics) == ["f1_micro", "f1_macro", "accuracy", "loss"], out, err)
    expect(metrics["f1_micro"] > 0.9 and "\nlabels: damage: 47, delivery: " in out, out)
    expect(re.search("\nF1 is 0.9[0-9]+ on average, damage: [01][.]", out) or metrics["f1_macro"] == 1, out)
    rows = list(csv.DictReader(contents(run, "metrics.csv").decode().splitlines()))
    for row in rows:
        expect((row["f1_micro"] == "") == (row["split"] == "train"), row)
    with open(os.path.join(run, "config.json")) as f:
        expect(json.load(f)["problem_type"] == "multi_label_classification", "config.json")
    both = "The glass is broken. The quality is wonderful."
    status, out, err = call(TEXT, "--out", run, "--predict", both)
    expect(re.fullmatch("damage [01][.][0-9]{4}, praise [01][.][0-9]{4}\t" + both + "\n", out), out, err)
    status, out, err = call(TEXT, "--out", run, "--predict", "What are your opening hours?")
    expect(out == "none\tWhat are your opening hours?\n", out, err)
    status, out, err = call(TEXT, "--model", run, "--epochs=1", "--out", run + "4")
    expect(status == 0 and f"--task is labels, as '{run}' says\n" in out and "f1_micro" in out, out, err)
    status, out, err = call(TEXT, "--model", run, "--task=tags", "--epochs=1", "--out", run + "5")
    expect(status == 0 and f"note: --task is tags, but '{run}' holds a model for --task labels\n" in out, out, err)
    write_table(table, [["words", "kinds"]] + [[f"{WORDS[k % 6]} film", "up;new" if k % 6 < 3 else ""]
                                               for k in range(48)])
    status, out, err = call(TEXT, "--task=labels", "--data", table, "--text-column=words", "--epochs=1",
                            "--label-column=kinds", "--label-delimiter=;", "--best-by=f1_macro", "--out", run + "2")
    expect(status == 0 and "\nlabels: new: " in out, out, err)
    refused(TEXT, "--task=labels", "--data", folder, "--out", run + "3",
            saying=f"--task labels needs a table; '{folder}' is a folder of reviews with classes")


@check
def scores_of_pairs(folder):
    """Checks that scores depend on both texts, and that two ranks give equal metrics."""
    run = os.path.join(folder, "run")
    status, out, err = call(TEXT, "--task=scores", "--groups=2", "--out", run)
    metrics = metrics_of_test(out)
    expect(status == 0 and list(metrics) == ["pearson", "spearman", "loss"], out, err)
    expect(metrics["pearson"] > 0.8 and metrics["spearman"] > 0.8 and "\nscores: LABEL_0\n" in out, out)
    status, out, err = call(TEXT, "--task=scores", "--groups=2", "--device=cpu*2", "--out", run + "2")
    expect(status == 0 and metrics_of_test(out) == metrics, out, err)
    expect(contents(run, "model.safetensors") == contents(run + "2", "model.safetensors"), "two ranks differ")
    scores = []
    for room, meal in ("Room was filthy and loud.", "The bread was stale."), ("The bed was soft.", "The eggs were fresh."):
        status, out, err = call(TEXT, "--out", run, "--pair-column=text_pair", "--predict", f"{room}\t{meal}")
        scores.append(float(re.fullmatch("(-?[0-9.]+)\t" + room + "\t" + meal + "\n", out).group(1)))
    expect(scores[0] + 1 < scores[1], scores)
    status, out, err = call(TEXT, "--task=scores", "--groups=2", "--out", run, "--resume", "--best-by=spearman")
    expect(status == 1 and "was chosen by its pearson, not by its spearman" in err, out, err)
    status, out, err = call(TEXT, "--task=scores", "--best-by=f1_macro", "--out", run + "3")
    expect(status == 1 and "best_by is 'f1_macro', and the model has only 'loss', 'pearson' or 'spearman'" in err,
           out, err)


@check
def tags_of_words(folder):
    run = os.path.join(folder, "run")
    status, out, err = call(TEXT, "--task=tags", "--out", run)
    metrics = metrics_of_test(out)
    expect(status == 0 and list(metrics) == ["f1_entities", "accuracy", "loss"], out, err)
    expect(metrics["f1_entities"] > 0.8 and "\ntags: B-PERSON: " in out, out)
    text = "Clara  met Ben Carter in New York ."
    status, out, err = call(TEXT, "--out", run, "--predict", text)
    expect(status == 0 and [word.split("/")[0] for word in out.split()] == text.split(), out, err)
    expect("Ben/B-PERSON Carter/I-PERSON" in out and "New/B-PLACE York/I-PLACE" in out, out)
    blank = "\u200b" # the tokenizer drops this character, so a word of it has no token
    status, out, err = call(TEXT, "--out", run, "--predict", f"Clara {blank} {blank} {blank} met Ben {blank}")
    expect(status == 0 and [word.split("/")[0] for word in out.split()] == ["Clara", "met", "Ben"], out, err)
    with open(os.path.join(run, "config.json")) as f:
        expect(json.load(f)["architectures"] == ["DistilBertForTokenClassification"], "config.json")


@check
def features_of_a_frozen_encoder(folder):
    """Checks that --features-once trains the head of a frozen encoder as without the option, and that the
    run can be resumed and predicts."""
    run, options = os.path.join(folder, "run"), ["--freeze=encoder", "--dropout=0", "--epochs=3", "--lr=1e-2"]
    results = []
    for k, features in enumerate(([], ["--features-once"])):
        status, out, err = call(TEXT, *options, *features, "--out", run + str(k))
        expect(status == 0 and "\nfrozen: the encoder (36 parameters)\n" in "\n" + out, out, err)
        expect((k == 1) == ("--features-once computes 0.5 MB of features" in out), out)
        results.append(metrics_of_test(out))
    for name, value in results[0].items():
        expect(abs(value - results[1][name]) <= (0.001 if name == "loss" else 0.01), results)
    status, out, err = call(TEXT, *options, "--features-once", "--epochs=4", "--out", run + "1", "--resume")
    expect(status == 0 and "epoch 4/4" in out and "epoch 3/4" not in out, out, err)
    status, out, err = call(TEXT, "--out", run + "1", "--predict", "a good film")
    expect(status == 0 and re.fullmatch("(pos|neg)\t[01][.][0-9]{4}\ta good film\n", out), out, err)
    refused(TEXT, "--features-once", "--out", run + "2", saying="--features-once is set, but the model computes "
            "nothing from inputs and frozen parameters alone: freeze the first layers")
    refused(IMAGES, "--features-once", "--augment", "--out", run + "2",
            saying="--augment changes images, so leave out --features-once")
    refused(GPT, "--freeze=encoder", "--out", run + "2",
            saying="--freeze encoder is for models with a classifier, but this model has none")


@check
def similar_texts(folder):
    """Checks that --task embed finds answers to questions, with the negatives of a micro-batch or of the step."""
    run, widths = os.path.join(folder, "run"), []
    for k, more in enumerate(([], ["--accumulate=4", "--negatives=step"])):
        status, out, err = call(TEXT, "--task=embed", "--batch=32", "--epochs=8", *more, "--out", run + str(k))
        metrics = metrics_of_test(out)
        expect(status == 0 and list(metrics) == ["recall_at_1", "recall_at_10"], out, err)
        expect(metrics["recall_at_1"] > 0.8 and metrics["recall_at_10"] == 1, out)
        status, out, err = call(TEXT, "--out", run + str(k), "--predict", "Where can I swim in Oslo?")
        expect(status == 0 and out.endswith("\tWhere can I swim in Oslo?\n"), out, err)
        widths.append(len(out.split("\t")[0].split()))
    expect(widths == [128, 128], widths)
    expect(os.path.isfile(os.path.join(run + "1", "modules.json")), os.listdir(run + "1"))
    refused(TEXT, "--task=embed", "--batch=max", "--out", run + "2", saying="--batch max is not for --task embed")
    refused(TEXT, "--task=embed", "--class-weights=balanced", "--out", run + "2",
            saying="--class-weights is for classes, but --task embed has none")
    refused(TEXT, "--negatives=step", "--out", run + "2",
            saying="--negatives has no effect with --task class: it is for --task embed")
    refused(TEXT, "--task=embed", "--temperature=0", "--out", run + "2",
            saying="--temperature 0; expected a finite number above 0")
    for batch, left, *more in ("97", 0), ("32", 1), ("64", 0), ("48", 1, "--accumulate=2"), ("45", 7, "--accumulate=4"):
        status, out, err = call(TEXT, "--task=embed", "--batch", batch, "--epochs=1", *more, "--out", run + "2" + batch)
        note = f"note: each epoch leaves out {left} of 97 pairs" if left else "leaves out"
        expect(status == 0 and (note in out) == bool(left), batch, out, err)
    with open(os.path.join(run + "0", "vocab.txt"), "rb+") as f:
        f.truncate(2000)
    refused(TEXT, "--out", run + "0", "--predict", "x", saying=f"'{run}0/vocab.txt' has ")


@check
def similar_texts_with_scores(folder):
    """Checks that rows for validation and test may have scores, and rows to train on may not."""
    run = os.path.join(folder, "run")
    table = os.path.join(folder, "pairs.csv")
    rows = list(csv.DictReader(contents("examples/data/questions.tsv").decode().splitlines(), delimiter="\t"))
    write_table(table, [["text", "text_pair", "score", "split"]] +
                [[r["text"], rows[(k + k % 2) % len(rows)]["text_pair"], "", "train"] for k, r in enumerate(rows[::2])] +
                [[r["text"], rows[(k + k % 2 * 7) % len(rows)]["text_pair"], 5 - k % 2 * 4.5,
                  ("dev", "test")[k % 4 // 2]] for k, r in enumerate(rows)])
    status, out, err = call(TEXT, "--task=embed", "--data", table, "--epochs=8", "--out", run)
    metrics = metrics_of_test(out)
    expect(status == 0 and list(metrics) == ["pearson", "spearman"] and metrics["spearman"] > 0.3, out, err)
    refused(TEXT, "--task=embed", "--data", table, "--label-column=split", "--out", run + "4",
            saying="expected different names")
    refused(TEXT, "--task=embed", "--data", table, "--best-by=recall_at_1", "--out", run + "4",
            saying="--best-by recall_at_1 is undefined for pairs with scores to validate on: leave it out")
    refused(TEXT, "--task=embed", "--best-by=pearson", "--out", run + "4",
            saying="--best-by pearson is undefined for pairs without scores to validate on: leave it out")
    write_table(table, [["text", "text_pair", "score", "split"]] +
                [[r["text"], r["text_pair"], 1 if k % 3 else "", ("train", "dev", "test")[k % 3]]
                 for k, r in enumerate(rows)])
    status, out, err = call(TEXT, "--task=embed", "--data", table, "--epochs=1", "--out", run + "5")
    expect(status == 0 and "best epoch: pearson undefined, spearman undefined on 48 test texts\n"
           "note: spearman is undefined if all scores, or all predictions, are one number\n" in out, out, err)
    expect(", spearman undefined, kept" in out + err, out, err)
    write_table(table, [["text", "text_pair", "score"]] + [[r["text"], r["text_pair"], 1] for r in rows])
    refused(TEXT, "--task=embed", "--data", table, "--out", run + "4",
            saying=f"'{table}' has scores for the pairs to train on, which --task embed cannot use")


@check
def flags_without_effect(folder):
    run = os.path.join(folder, "run")
    for task, flag, saying in (("class", "--temperature=1", "is for --task embed"),
                               ("tags", "--pair-column=b", "is for --task class, labels, scores or embed"),
                               ("class", "--label-delimiter=;", "is for --task labels or scores"),
                               ("tags", "--quote=none", "which is in the format of CoNLL: leave it out")):
        refused(TEXT, "--task", task, flag, "--out", run, saying=flag.split("=")[0] + " has no effect ")
        refused(TEXT, "--task", task, flag, "--out", run, saying=saying)
    lines = os.path.join(folder, "t.jsonl")
    with open(lines, "w") as f:
        f.writelines(json.dumps({"text": w, "label": k % 2}) + "\n" for k, w in enumerate(WORDS))
    refused(TEXT, "--data", lines, "--delimiter=;", "--out", run,
            saying=f"--delimiter has no effect on '{lines}', which is in lines of JSON: leave it out")


@check
def students_of_a_teacher(folder):
    """Checks --teacher for texts and images: its logits, computed once or beside the student, and its hidden
    states. A stopped run resumes with the same bits. A teacher with other classes is refused."""
    path = functools.partial(os.path.join, folder)
    table = small_table(path("t.csv"))
    status, out, err = call(TEXT, "--data", table, "--threads=1", "--epochs=3", "--out", path("teacher"))
    expect(status == 0, out, err)
    student = (TEXT, "--data", table, "--threads=1", "--model", path("teacher"), "--layers=1", "--epochs=3",
               "--batch=2", "--lr=1e-3", "--out")
    saved, teach = [], ("--teacher", path("teacher"))
    for more in (), teach, (*teach, "--hidden-weight=1"), (*teach, "--hidden-weight=1", "--features-once"):
        status, out, err = call(*student, path("s" + str(len(saved))), *more)
        expect(status == 0, out, err)
        expect("still allocated" not in err, err)
        expect(("the teacher runs once; its logits take" in out) == (more == teach), out)
        expect(("the teacher runs beside" in out) == (len(more) > 2), out)
        expect(("teacher.distilbert" in out) == (len(more) > 2), "the plan", out)
        saved.append(contents(path("s" + str(len(saved))), "model.safetensors"))
    expect(len(set(saved[:3])) == 3, "--teacher changes nothing")
    with open(path("s2", "config.json")) as f:
        expect(json.load(f)["n_layers"] == 1, "--layers")
    size = [os.path.getsize(path(f"s{k}", "model.safetensors")) for k in range(3)]
    expect(size[0] == size[1] == size[2], "the student's file has the teacher's parameters", size)
    status, out, err = call(*student, path("plan"), *teach, "--plan")
    expect(status == 0 and not os.path.exists(path("plan", "state.safetensors")), out, err)
    options = (*student[1:], path("stopped"), *teach, "--hidden-weight=1")
    status, out, sent = stopped(TEXT, options, signal.SIGINT)
    expect(status == 130 and sent == 1, status, out)
    status, out, err = call(TEXT, *options, "--resume")
    expect(status == 0 and contents(path("stopped"), "model.safetensors") == saved[2], out, err)
    refused(*student, path("no"), "--hidden-weight=1", saying="--hidden-weight needs a --teacher")
    refused(TEXT, "--data", table, "--layers=3", "--out", path("no"),
            saying="--layers is 3, but the model has 2 layers")
    status, out, err = call(TEXT, "--task=labels", "--teacher", path("teacher"), "--out", path("no"))
    expect(status == 1 and f"--teacher '{path('teacher')}' has no trained classifier for the task" in err, err)
    for name in "weight", "temperature":
        refused(*student, path("no"), f"--teacher-{name}=0.9", saying=f"--teacher-{name} needs a --teacher: name")
    # Two teachers: one has the tokens of the student in another order, the other one token more.
    for name, change in ("swapped", lambda lines: lines[:-2] + lines[:-3:-1]), ("more", lambda lines: lines + ["x"]):
        shutil.copytree(path("teacher"), path(name))
        with open(path(name, "vocab.txt")) as f:
            lines = f.read().split("\n")[:-1]
        with open(path(name, "vocab.txt"), "w") as f:
            f.write("\n".join(change(lines)) + "\n")
    refused(*student, path("no"), "--teacher", path("swapped"), saying=f"of --teacher '{path('swapped')}' is '")
    refused(*student, path("no"), "--teacher", path("more"), saying=f"of --teacher '{path('more')}' has ")
    # Other classes with the same numbers would teach the opposite.
    shutil.copytree(path("teacher"), path("renamed"))
    with open(path("renamed", "config.json")) as f:
        config = f.read()
    with open(path("renamed", "config.json"), "w") as f:
        f.write(config.replace('"up"', '"zup"'))
    refused(*student, path("no"), "--teacher", path("renamed"), saying="the data have the class 'up', but --teacher")
    # A run whose logits are computed once resumes with its teacher alone.
    options = (*student[1:], path("once"), "--teacher", path("teacher"))
    status, out, sent = stopped(TEXT, options, signal.SIGINT)
    expect(status == 130 and sent == 1, status, out)
    status, out, err = call(TEXT, *options[:-1], path("s0"), "--resume")
    expect(status == 1 and "a run with the logits of another teacher: give the teacher with which" in err, err)
    status, out, err = call(TEXT, *options, "--resume")
    expect(status == 0 and contents(path("once"), "model.safetensors") == saved[1], out, err)
    images = ("--train=60", "--test=20", "--epochs=1", "--threads=1", "--out")
    status, out, err = call(IMAGES, *images, path("shapes"))
    expect(status == 0, out, err)
    for k, more in enumerate(((), ("--augment",), ("--hidden-weight=1",))):
        status, out, err = call(IMAGES, *images, path(f"i{k}"), "--model", path("shapes"), "--layers=2",
                                "--teacher", path("shapes"), *more)
        expect(status == 0 and ("runs beside" in out) == (k > 0) and not err, out, err)


@check
def masked_words(folder):
    """Checks --task masked-words on a file of texts and on the sample, and a classifier that starts from the
    trained encoder."""
    texts, run = os.path.join(folder, "texts.txt"), os.path.join(folder, "run")
    with open(texts, "w") as f:
        f.writelines(f"a good film number {k % 9} of bad ones\n" for k in range(60))
    status, out, err = call(TEXT, "--task=masked-words", "--data", texts, "--whole-words", "--epochs=2", "--out",
                            run)
    expect(status == 0 and list(metrics_of_test(out)) == ["accuracy", "perplexity", "loss"], out, err)
    for words, epochs, other in ("--whole-words", 3, False), ("--threads=1", 4, True):
        status, out, err = call(TEXT, "--task=masked-words", "--data", texts, words, f"--epochs={epochs}", "--out",
                                run, "--resume")
        expect(status == 0 and ("was trained on other data or masks" in err) == other, words, out, err)
    with open(os.path.join(run, "config.json")) as f:
        expect(json.load(f)["architectures"] == ["DistilBertForMaskedLM"], "config.json")
    refused(TEXT, "--out", run, "--predict", "x", saying="holds a model of masked words, which --predict cannot")
    refused(TEXT, "--task=masked-words", "--class-weights=balanced", "--out", run + "2",
            saying="--class-weights is for classes, but --task masked-words has none")
    status, out, err = call(TEXT, "--task=masked-words", "--epochs=1", "--best-by=perplexity", "--model", run,
                            "--train=50", "--test=20", "--out", run + "3")
    expect(status == 0 and "kept" in out, out, err)
    status, out, err = call(TEXT, "--data", small_table(os.path.join(folder, "t.csv")), "--model", run + "3",
                            "--epochs=1", "--out", run + "4")
    expect(status == 0 and "accuracy" in out, out, err)


@check
def samples_are_those_of_the_script(folder):
    status, out, err = call(sys.executable, "examples/data/make_tasks.py", "--out", folder)
    expect(status == 0, out, err)
    for name in "requests.tsv", "stays.tsv", "visits.conll", "questions.tsv":
        expect(contents(folder, name) == contents("examples/data", name), name)


@check
def few_steps_get_more_epochs(folder):
    """Checks the default of about 200 steps in at most 20 epochs, and the note about fewer than 100 steps."""
    table = small_table(os.path.join(folder, "t.csv"), texts=160)
    options = ["--data", table, "--threads=1", "--out"]
    status, out, err = call(TEXT, *options, os.path.join(folder, "a"))
    expect(status == 0 and "\n20 epochs of 9 steps; for " in out and "steps are few" not in out, out, err)
    status, out, err = call(TEXT, *options, os.path.join(folder, "b"), "--batch=8")
    expect(status == 0 and "\n12 epochs of 17 steps; for " in out, out, err)
    status, out, err = call(TEXT, *options, os.path.join(folder, "c"), "--epochs=3")
    expect(status == 0 and "\n3 epochs of 9 steps; for " in out, out, err)
    expect("\nnote: 27 steps are few" in out, out)


@check
def from_scratch_in_any_folder(folder):
    """Checks that a program finds the sample data in a folder above its own. If there is no sample data, the
    error must name the folders that were searched."""
    programs, elsewhere = os.path.join(folder, "tree", "build", "all"), os.path.join(folder, "elsewhere")
    os.makedirs(programs)
    os.makedirs(elsewhere)
    program = shutil.copy(TEXT, programs)
    refused(program, "--plan", folder=elsewhere,
            saying="and no examples/data/reviews.tsv in a folder above '" + program)
    shutil.copytree("examples/data", os.path.join(folder, "tree", "examples", "data"))
    status, out, err = call(program, "--plan", folder=elsewhere)
    expect(status == 0, out, err)
    expect(re.search(r"\d+ texts to train on, \d+ for validation; from scratch", out), out)


def stopped(program, options, *signals):
    """Sends signals to a program in the middle of training. Returns its exit status, its output, and the
    number of signals sent while the program still ran."""
    process = subprocess.Popen([program, *options], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                               stderr=subprocess.STDOUT, text=True)
    said, sent = "", 0
    while "\nepoch " not in said:                   # the first step prints a line of progress
        line = process.stdout.readline()
        expect(line, "ended before it trained:", said)
        said += line
    for number in signals:
        sent += process.poll() is None
        process.send_signal(number)
        time.sleep(0.02)
    said += process.communicate(timeout=300)[0]
    return process.returncode, said, sent


@check
def statuses_of_signals(folder):
    for program, number, status in ((TEXT, signal.SIGINT, 130), (TEXT, signal.SIGTERM, 143),
                                    (IMAGES, signal.SIGINT, 130)):
        run = os.path.join(folder, f"{os.path.basename(program)}_{status}")
        is_text = program == TEXT
        few = ["--epochs=4"] if is_text else ["--epochs=1", "--train=1000", "--test=100"]
        options = ["--out", run, *few]
        got, said, _ = stopped(program, options, number)
        expect(got == status, "status", got, "and not", status, "of", program, said)
        expect("--resume continues from there" in said, said)
        expect(os.path.exists(os.path.join(run, "state.safetensors")), said)
        if is_text and status == 130:
            refused(program, *options, saying="holds a run: continue it (--resume)")
            got, out, err = call(program, *options, "--resume")
            expect(got == 0 and "best epoch: accuracy" in out, "resumed:", out, err)


def contents(*path):
    with open(os.path.join(*path), "rb") as f:
        return f.read()


@check
def any_number_of_ranks_trains_the_same(folder):
    """Compares the result of one rank with the results of two ranks that shard and offload in several ways,
    and of a run that stops on four ranks and resumes on two with updates on the host."""
    few = {TEXT: ["--train=400", "--epochs=2"], IMAGES: ["--train=80", "--test=20", "--epochs=1"]}
    for program, more in few.items():
        def run(name, *options, then=None):
            out = os.path.join(folder, os.path.basename(program) + "_" + name)
            options = ["--out", out, "--groups=4", "--reduce-micros", *more, *options]
            if then:
                got, said, _ = stopped(program, options, signal.SIGINT)
                expect(got == 130 and "--resume continues from there" in said, name, "status", got, said)
                return run(name, *then)
            status, said, err = call(program, *options)
            expect(status == 0 and "warning" not in err, name, "status", status, said, err)
            return out
        one = run("one", "--device=cpu")
        others = [run("two", "--device=cpu*2", "--zero=3", "--threads=3", "--offload=" + EVERYTHING)]
        if program == TEXT:
            others += [run("server", "--device=cpu*2", "--server", "--data-ranks=2", "--offload=optimizer"),
                       run("parts", "--device=cpu*4",
                           then=["--device=cpu*2", "--zero=2", "--resume", "--update=host"])]
        for other in others:
            for name in "model.safetensors", "state.safetensors":
                expect(contents(one, name) == contents(other, name), name, "differs of", other)


@check
def any_number_of_stages_trains_the_same(folder):
    """Compares the result of one rank with the results of two stages: schedule 1f1b with one data rank, and
    gpipe with two data ranks."""
    for program, more in {TEXT: ["--train=200", "--epochs=1"], IMAGES: ["--train=80", "--test=20"]}.items():
        def run(name, *options):
            out = os.path.join(folder, os.path.basename(program) + "_" + name)
            status, said, err = call(program, "--out", out, "--groups=4", "--epochs=1", "--schedule=constant",
                                     *more, *options)
            expect(status == 0 and "warning" not in err, name, "status", status, said, err)
            return out
        one = run("one", "--device=cpu")
        others = [run("two", "--device=cpu*2", "--pipeline=2"),
                  run("four", "--device=cpu*4", "--pipeline=2", "--schedule", "gpipe", "--micros=2",
                      "--timeout=60")]
        for other in others:
            for name in "model.safetensors", "state.safetensors":
                expect(contents(one, name) == contents(other, name), name, "differs of", other)


@check
def a_second_signal_ends_at_once(folder):
    long_steps = ["--batch=512", "--max-tokens=60000", "--epochs=100"]
    got, said, sent = stopped(TEXT, ["--out", os.path.join(folder, "run"), *long_steps], signal.SIGTERM,
                              signal.SIGINT)
    expect(got == (-signal.SIGINT if sent == 2 else 143), "status", got, "after", sent, "signals", said)


def begun(*options, stderr=subprocess.STDOUT, before=None):
    """Starts a run. Returns the process of the run once it trains."""
    process = subprocess.Popen([TEXT, *options], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                               stderr=stderr, text=True, preexec_fn=before)
    while "epoch " not in (line := process.stdout.readline()):
        expect(line, "ended before it trained")
    return process


@check
def other_signals_stop_training_too(folder):
    table = small_table(os.path.join(folder, "t.csv"))

    def options(run, epochs=1000):
        return ["--data", table, "--out", os.path.join(folder, run), f"--epochs={epochs}"]
    for number in signal.SIGHUP, signal.SIGXCPU:
        process = begun(*options(number.name))
        for _ in range(2):                          # a second signal changes nothing
            process.send_signal(number)
        said = process.communicate(timeout=300)[0]
        expect(process.returncode == 128 + number, "status", process.returncode, said)
        expect("--resume continues from there" in said, said)
    process = begun(*options("pipe"), stderr=subprocess.PIPE)
    process.stdout.close()
    process.stdout = None
    err = process.communicate(timeout=300)[1]
    expect(process.returncode == 128 + signal.SIGPIPE, "status", process.returncode, err)
    expect("because nobody reads standard output any more; --resume continues from there" in err, err)
    process = begun(*options("nohup", 20), before=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
    process.send_signal(signal.SIGHUP)
    said = process.communicate(timeout=300)[0]
    expect(process.returncode == 0 and "best epoch" in said, process.returncode, said)


@check
def a_limit_of_file_size_is_told(folder):
    run = os.path.join(folder, "run")
    table, limit = small_table(os.path.join(folder, "t.csv")), 1 << 20
    done = subprocess.run([TEXT, "--data", table, "--out", run, "--epochs=1"], capture_output=True, text=True,
                          preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)))
    expect(done.returncode == 1 and "File too large" in done.stderr and "state.safetensors" in done.stderr,
           done.returncode, done.stdout, done.stderr)


@check
def the_log_of_a_killed_run_is_not_lost(folder):
    run = os.path.join(folder, "run")
    process = subprocess.Popen([TEXT, "--out", run, "--batch=512", "--max-tokens=60000", "--epochs=100"],
                               stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    while not os.path.exists(os.path.join(run, "metrics.csv")):
        expect(process.poll() is None, "has ended")
    process.kill()                                  # kills the run before its first step ends
    said = process.communicate()[0]
    expect("texts to train on" in said and "memory plan" in said, repr(said))


@check
def a_run_that_blows_up_says_what_helps(folder):
    run = os.path.join(folder, "run")
    options = ["--data", small_table(os.path.join(folder, "t.csv")), "--batch=8", "--out", run]
    status, out, err = call(TEXT, *options, "--epochs=2", "--lr=1e-4", "--schedule=constant")
    expect(status == 0, out, err)
    status, out, err = call(TEXT, *options, "--resume", "--epochs=6", "--lr=1e6", "--schedule=constant")
    expect(status == 1 and "7 steps in a row updated nothing" in err, status, out, err)
    expect("the state of step 14 is saved: resume it with a lower learning rate" in err, err)
    expect("no state was saved" not in out and "continues from" not in out, out)
    status, out, err = call(TEXT, *options, "--resume", "--epochs=6", "--lr=1e-5", "--schedule=constant")
    expect(status == 0 and "best epoch: accuracy" in out, status, out, err)


@check
def no_promise_to_resume_what_was_not_saved(folder):
    run = os.path.join(folder, "run")
    os.mkdir(run)
    os.mkdir(os.path.join(run, "loss.svg"))        # keeps loss.svg from being written
    got, said, _ = stopped(TEXT, ["--out", run, "--epochs=100"], signal.SIGINT)
    expect(got != 0 and "loss.svg" in said, got, said)
    saved = os.path.exists(os.path.join(run, "state.safetensors"))
    expect("--resume continues from there" not in said or saved, said)


@check
def killed_runs_go_on_bit_for_bit(folder):
    """Kills runs that save ten times a second at random moments, KILLS times (10), and resumes them until
    they end. Checks that no run hangs, and that the files equal those of a run that was not killed. Also
    checks runs whose loss diverges, which have two states for some time."""
    most, seed = int(os.environ.get("KILLS", "10")), random.randrange(1 << 30)
    moments, resumed, two_states = random.Random(seed), 0, 0
    table = small_table(os.path.join(folder, "t.csv"))
    for diverges in False, True:
        few = ["--lr=0.3", "--epochs=6"] if diverges else ["--epochs=20"]
        options = ["--data", table, "--batch=8", *few]
        whole, run = (os.path.join(folder, f"{name}{diverges}") for name in ("whole", "run"))
        status, out, err = call(TEXT, *options, "--out", whole)
        expect(status == 0 and ("diverged" in err) == diverges, out, err)

        def metrics(of):
            return [line.rsplit(",", 2)[0] for line in contents(of, "metrics.csv").decode().splitlines()]
        kills = 0
        while kills < most / 2:
            shutil.rmtree(run, ignore_errors=True)
            while True:
                again = ["--resume"] if os.path.exists(os.path.join(run, "state.safetensors")) else []
                process = subprocess.Popen([TEXT, *options, "--out", run, *again], stdin=subprocess.DEVNULL,
                                           stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
                try:
                    life = moments.uniform(0, 0.6) if kills < most / 2 else 300
                    said = process.communicate(timeout=life)[0]
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.communicate()
                    kills += 1
                    resumed += len(again)
                    two_states += os.path.exists(os.path.join(run, "state.diverged.safetensors"))
                    continue
                expect(process.returncode == 0, "status", process.returncode, "seed", seed, said)
                break
            expect(sorted(os.listdir(whole)) == sorted(os.listdir(run)), os.listdir(run), "seed", seed)
            for name in os.listdir(whole):
                if name != "metrics.csv":
                    expect(contents(whole, name) == contents(run, name), name, "differs, seed", seed)
            expect(metrics(whole) == metrics(run), "metrics differ, seed", seed)
    if most > 10:
        print(f"{most} kills, {resumed} of resumed runs, {two_states} with two states")


@check
def two_runs_into_one_folder(folder):
    run = os.path.join(folder, "run")
    options = ["--data", small_table(os.path.join(folder, "t.csv")), "--out", run, "--epochs=1000"]
    first = subprocess.Popen([TEXT, *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    def wait_for(name):
        while not os.path.exists(os.path.join(run, name)):
            expect(first.poll() is None, "the first has ended")
    wait_for("run.lock")
    second = call(TEXT, *options)
    if "holds a run" in second[2]:          # the first run has already saved its state
        second = call(TEXT, *options, "--resume")
    expect(second[0] == 1 and f"is in use by another run (process {first.pid} of " in second[2], second)
    wait_for("state.safetensors")
    first.send_signal(signal.SIGINT)
    said = first.communicate(timeout=300)[0]
    expect(first.returncode == 130 and "--resume continues from there" in said, first.returncode, said)


@check
def folders_with_and_without_a_run(folder):
    run = os.path.join(folder, "run")
    os.mkdir(run)
    table = small_table(os.path.join(folder, "t.csv"))
    for program, data in (TEXT, ["--data", table]), (IMAGES, []):
        refused(program, *data, "--out", run, "--resume", saying="nothing to --resume: '")
    open(os.path.join(run, "model.safetensors"), "w").close()
    refused(TEXT, "--data", table, "--out", run,
            saying="holds a model, which training would replace: name another folder")
    os.rename(os.path.join(run, "model.safetensors"), os.path.join(run, "adapter_config.json"))
    for program in TEXT, GPT:
        refused(program, "--data", table, "--out", run,
                saying="holds an adapter, which transformers would add")
    # too long for a file name, so that the program cannot tell whether the folder exists
    name = "n" * 300
    refused(TEXT, "--data", table, "--out", os.path.join(folder, name), saying="cannot find out whether '")


def on_terminal(columns, *command):
    """Returns the output of a program on a terminal with `columns` columns."""
    child, fd = pty.fork()
    if child == 0:
        fcntl.ioctl(1, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
        os.execv(command[0], command)
    said = b""
    while True:
        try:
            part = os.read(fd, 65536)
        except OSError:
            break
        if not part:
            break
        said += part
    os.close(fd)
    expect(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, said.decode(errors="replace"))
    return said.decode(errors="replace").replace("\x1b[K", "")


@check
def progress_fits_the_terminal(folder):
    table = small_table(os.path.join(folder, "t.csv"))
    for columns in 40, 60, 80, 92, 200:
        run = os.path.join(folder, f"run{columns}")
        said = on_terminal(columns, TEXT, "--data", table, "--epochs=1", "--out", run)
        lines = [line for line in re.split(r"[\r\n]+", said) if line.startswith("epoch ")]
        expect(lines and max(map(len, lines)) < columns, columns, "columns:", lines)
        expect(all(re.search(r"ETA \d+:\d\d$", line) for line in lines),
               columns, "columns without the time that is left:", lines)
        expect(columns < 92 or "[" in lines[0], columns, "columns without a bar:", lines)
        if columns == 40:
            helped = on_terminal(columns, TEXT, "--help")
            expect(max(map(len, helped.splitlines())) <= 60 and "tokens of a" in helped, helped)


@check
def hello_goes_on_bit_for_bit(folder):
    """Checks that hello learns, that a resumed run has the same bits, and that hello refuses the state of
    another model."""
    whole, parts = (os.path.join(folder, name) for name in ("whole", "parts"))
    os.mkdir(whole)
    os.mkdir(parts)
    status, out, err = call(HELLO, "80", folder=whole)
    learnt = re.search(r"^step 80: loss 0\.\d+, (9\d\.\d|100\.0)% right$", out, re.M)
    expect(status == 0 and learnt and not err, status, out, err)
    said = ""
    for steps in "40", "80":
        status, more, err = call(HELLO, steps, folder=parts)
        expect(status == 0 and not err, status, more, err)
        said += more
    expect(said == out, "in parts:", said, "at once:", out)
    state = "hello.safetensors"
    expect(contents(whole, state) == contents(parts, state), "a resumed run has another state")
    with open(os.path.join(parts, state), "wb") as f:
        f.write(contents(whole, state).replace(b'"q.1"', b'"q.7"'))
    refused(HELLO, "90", folder=parts, saying="has no tensor 'q.1': it is the state of another model")


@check
def language_models(folder):
    """Checks training from scratch, after a stop, from a checkpoint, and with adapters. Also checks the texts
    that trained models generate."""
    def path(name):
        return os.path.join(folder, name)
    text = "".join(f"{a} {b} cat sat.\n\n" for a in ("the", "one", "my") for b in ("big", "old", "red")) * 60
    with open(path("text.txt"), "w") as f:
        f.write(text)
    tuned = (GPT, "--data", path("text.txt"), "--length=32", "--batch=8", "--tokens=40", "--temperature=0",
             "--lr=1e-2", "--separator=")
    tiny = (*tuned, "--layers=1", "--hidden=16", "--heads=2")
    status, out, err = call(*tiny, "--epochs=3", "--out", path("run"))
    expect(status == 0 and "bits per byte on" in out and "It is a truth" in out, status, out, err)
    ends = json.loads(contents(path("run"), "config.json"))
    expect((ends["bos_token_id"], ends["eos_token_id"], ends["pad_token_id"]) == (None, 256, None), ends)
    bits = float(re.search(r"([0-9.]+) bits per byte", out)[1])
    expect(bits < 3, bits)
    loads = (GPT, "--generate", "the ", "--tokens=20", "--temperature=0")
    for other, what in (("--layers=1", "but --generate uses a trained one"), ("--rank=1", "leave them out"),
                        ("--resume", "--generate trains nothing")):
        refused(*loads, "--out", path("run"), other, saying=what)
    status, made, err = call(*loads, "--out", path("run"))
    expect(status == 0 and made.startswith("the ") and len(made) > 6, status, made, err)
    stopped(GPT, (*tiny[1:], "--epochs=3", "--out", path("again")), signal.SIGINT)
    status, out, err = call(*tiny, "--epochs=3", "--out", path("again"), "--resume")
    expect(status == 0, out, err)
    first, second = (contents(path(name), "model.safetensors") for name in ("run", "again"))
    expect(first == second, "a resumed run trains something else")

    status, smooth, err = call(*tiny, "--epochs=3", "--label-smoothing=0.1", "--out", path("smooth"))
    expect(status == 0, smooth, err)
    rows = list(csv.DictReader(contents(path("smooth"), "metrics.csv").decode().splitlines()))
    last = {row["split"]: float(row["loss"]) for row in rows}
    expect(last["validation"] < last["train"] - 0.1, "the validation's loss is smoothed too:", last)

    ranks = [call(*tiny, "--groups=2", "--device", on, "--out", path(on)) for on in ("cpu", "cpu*2")]
    expect(all(status == 0 and "It is a truth" in out for status, out, _ in ranks), ranks)
    first, second = (contents(path(name), "model.safetensors") for name in ("cpu", "cpu*2"))
    expect(first == second, "two ranks train something else")

    lora = (*tuned, "--model", path("run"), "--lora=2")
    status, out, err = call(*lora, "--out", path("adapter"))
    expect(status == 0 and "adapter_config.json" in os.listdir(path("adapter")) and
           "model.safetensors" not in os.listdir(path("adapter")), status, out, err)
    status, adapted, err = call(*loads, "--model", path("run"), "--adapter", path("adapter"))
    expect(status == 0 and adapted.startswith("the "), status, adapted, err)
    refused(*loads, "--out", path("adapter"), saying="holds an adapter: name its model with --model")
    sampled = [call(*loads[:-1], "--temperature=1", "--seed=3", "--out", path("run")) for _ in range(2)]
    expect(sampled[0][0] == 0 and sampled[0] == sampled[1], *sampled)

    expect(f'"base_model_name_or_path": "{path("run")}"' in
           contents(path("adapter"), "adapter_config.json").decode(), "an adapter does not name its base")
    for run, other in ("run", [*tiny, "--hidden=32"]), ("adapter", [*tuned, "--model", path("run")]):
        status, out, err = call(*other, "--epochs=4", "--out", path(run), "--resume")
        hint = f"the model that '{path(run)}' started with: give the same --model"
        expect(status == 1 and hint in err, err)
    sizes = [os.path.getsize(os.path.join(path(run), "state.safetensors")) for run in ("run", "adapter")]
    expect(sizes[1] < sizes[0] / 4, "the state of adapters has the model too:", sizes)
    status, out, err = call(*tiny, "--epochs=1", "--seed=5", "--out", path("other"))
    expect(status == 0, out, err)
    adapted = contents(path("adapter"), "adapter_model.safetensors")
    status, out, err = call(*tuned, "--model", path("other"), "--lora=2", "--epochs=2", "--out",
                            path("adapter"), "--resume")
    hint = "' has other values: resume with the model that the run started from"
    expect(status == 1 and hint in err, err)
    expect(contents(path("adapter"), "adapter_model.safetensors") == adapted, "a refused run wrote one")
    status, out, err = call(*lora, "--epochs=2", "--out", path("adapter"), "--resume")
    expect(status == 0 and contents(path("adapter"), "adapter_model.safetensors") != adapted, out, err)
    answers(path("run"), loads)

    few = (*lora, "--base-bits=8", "--epochs=2")
    status, out, err = call(*few, "--out", path("few"))
    expect(status == 0 and "linear layers: 0.0 MB in int8" in out, out, err)
    stopped(GPT, (*few[1:], "--out", path("few2")), signal.SIGINT)
    status, out, err = call(*few, "--out", path("few2"), "--resume")
    first, second = (contents(path(name), "adapter_model.safetensors") for name in ("few", "few2"))
    expect(status == 0 and first == second, "a resumed run on a base of 8 bits trains something else", err)
    status, out, err = call(*lora, "--epochs=3", "--out", path("few"), "--resume")
    expect(status == 1 and hint in err, err)
    for bits in "8", "int4":
        status, out, err = call(*loads, "--model", path("run"), "--adapter", path("few"), "--base-bits", bits)
        expect(status == 0 and out.startswith("the "), status, out, err)
    refused(GPT, "--model", path("run"), "--base-bits=4",
            saying="--base-bits 4 freezes the model's weights: train adapters with --lora N")
    refused(GPT, "--base-bits=2", saying="--base-bits must be 8, 4, int4 or budget, not '2'")
    refused(GPT, "--model", path("run"), "--lora=2", "--generate=x",
            saying="--lora makes adapters to train, but --generate trains nothing")
    refused(GPT, "--lora=2", saying="--lora and --adapter adapt a model: name it with --model")
    for alone in ("--lora-targets=q", "--lora-alpha=4"):
        refused(GPT, "--model", path("run"), alone,
                saying="--lora-targets and --lora-alpha are for new adapters")
    refused(GPT, "--generate=x", "--out", path("none"), saying="holds no trained model")
    refused(GPT, "--hidden=10", "--heads=4", saying="--hidden is 10, but must be a multiple of --heads, 4")
    refused(GPT, "--top-p=0", saying="--top-p is 0, but must be above 0")
    refused(GPT, "--hidden=6", "--heads=2", saying="size is 3 in heads of 3 columns")
    refused(GPT, "--held-out=1", "--out", path("held"), saying="leaves 0 of 684769 tokens")
    refused(GPT, "--kind=gpt3", saying="--kind must be gpt2, llama")
    for shape in "--kind=llama", "--hidden=16", "--heads=2":
        refused(GPT, "--model", path("run"), shape, saying="--kind, --hidden and --heads shape a")
    refused(GPT, "--generate", "a" * 50, "--out", path("run"),
            saying="50 tokens, but must have fewer than the model's 32 positions")
    refused(*lora, "--lora-targets=q", "--out", path("x"),
            saying="no module that can have an adapter has a name that matches 'q'")
    refused(GPT, "--model", path("text.txt"), "--data", path("text.txt"), "--out", path("x"),
            saying="config.json'")
    refused(*tuned, "--model", path("run"), "--length=64", "--out", path("x"),
            saying="--length is 64, but must be at most 32, the model's positions")
    with open(path("wide.txt"), "w", encoding="utf-16") as f:
        f.write(text)
    refused(GPT, "--data", path("wide.txt"), "--out", path("x"),
            saying="begins with the byte order mark of UTF-16, but must be UTF-8: convert the file")


@check
def smaller_language_models(folder):
    """Checks models that lost layers, heads and neurons, or got factors: their plans, files, resumed runs
    and texts."""
    def path(name):
        return os.path.join(folder, name)

    def shape_of(run):
        c = json.loads(contents(path(run), "config.json"))
        return [c.get(key) for key in ("num_hidden_layers", "num_attention_heads", "num_key_value_heads",
                                       "head_dim", "intermediate_size")]
    with open(path("text.txt"), "w") as f:
        f.write("".join(f"{a} {b} cat sat.\n\n" for a in ("the", "one") for b in ("big", "old")) * 60)
    shape = ("--length=32", "--batch=8", "--tokens=10", "--temperature=0", "--lr=1e-2", "--separator=")
    tuned = (GPT, "--data", path("text.txt"), *shape)
    for kind, small in ("llama", True), ("gpt2", False):
        status, out, err = call(*tuned, "--kind", kind, "--layers=3", "--hidden=32", "--heads=4",
                                "--epochs=1", "--out", path(kind))
        expect(status == 0, out, err)
        loads = (*tuned, "--model", path(kind))
        cut = ("--layers=2", "--prune-neurons=0.75", "--rank=3", *["--prune-heads=0.5"] * small)
        whole, _ = planned("--data", path("text.txt"), *shape, "--model", path(kind), "--out", path("p"),
                           program=GPT)
        left, _ = planned("--data", path("text.txt"), *shape, "--model", path(kind), "--out", path("p"),
                          *cut, program=GPT)
        expect(left < 0.8 * whole, "the plan of a smaller model:", left, whole)
        status, out, err = call(*loads, *cut, "--epochs=3", "--out", path(kind + "-cut"))
        expect(status == 0, out, err)
        says = f"pruning: {2 if small else 4} of 4 heads and {'22 of 85' if small else '32 of 128'} neurons"
        expect(says in out and re.search(r"^rank 3: (\d+) of \1 weights have factors", out, re.M), out)
        expect(float(re.search(r"([0-9.]+) bits per byte", out)[1]) < 3, out)
        sizes = [os.path.getsize(os.path.join(path(kind + name), "model.safetensors")) for name in ("", "-cut")]
        expect(sizes[1] < 0.7 * sizes[0], sizes)
        stopped(GPT, (*loads[1:], *cut, "--epochs=3", "--out", path(kind + "-on")), signal.SIGINT)
        status, out, err = call(*loads, *cut, "--epochs=3", "--out", path(kind + "-on"), "--resume")
        first, second = (contents(path(kind + name), "model.safetensors") for name in ("-cut", "-on"))
        expect(status == 0 and first == second, "a resumed run trains something else", out, err)
        status, out, err = call(GPT, "--generate", "the ", "--tokens=10", "--temperature=0", "--out",
                                path(kind + "-cut"))
        expect(status == 0 and out.startswith("the ") and len(out) > 6, status, out, err)
    expect(shape_of("llama-cut") == [2, 2, 2, 8, 22], shape_of("llama-cut"))
    loads = (*tuned, "--out", path("x"), "--model")
    refused(*loads, path("gpt2"), "--prune-heads=0.5", saying="heads cannot be removed: remove neurons")
    refused(*loads, path("llama"), "--layers=4", saying="--layers is 4, but the model has 3 layers")
    refused(*loads, path("llama"), "--prune-heads=1", saying="--prune-heads is 1, but must be 0 or more")
    for smaller in "--layers=2", "--prune-heads=0.5", "--prune-neurons=0.5", "--rank=2":
        refused(*loads, path("llama"), "--lora=2", smaller, saying="train the smaller model first")
    refused(*loads, path("llama"), "--rank=2", "--weights=int8", saying="--weights int8 rounds matrices")
    with open(path("pairs.jsonl"), "w") as f:
        for k in range(20):
            json.dump({"prompt": "a", "chosen": f"b{k}", "rejected": "c"}, f)
            f.write("\n")
    refused(*loads, path("llama"), "--data", path("pairs.jsonl"), "--prune-heads=0.5",
            saying="has pairs of answers: prune with texts first")


@check
def bases_that_fit_a_budget(folder):
    """Checks that --base-bits budget takes the most exact base whose plan fits, in training and generation."""
    def path(name):
        return os.path.join(folder, name)
    with open(path("text.txt"), "w") as f:
        f.write("".join(f"the {a} cat sat.\n\n" for a in ("big", "old")) * 20)
    shape = ("--data", path("text.txt"), "--length=32", "--batch=8", "--tokens=10", "--temperature=0",
             "--separator=", "--threads=1")
    status, out, err = call(GPT, *shape, "--layers=1", "--hidden=192", "--heads=3", "--epochs=1", "--out",
                            path("model"))
    expect(status == 0, out, err)
    adapts = (*shape, "--model", path("model"), "--lora=2", "--out", path("adapter"))
    on_gpu = (*adapts, "--device=cuda", "--offload=none", "--recompute=cheap")  # a plan alone needs no GPU
    bases = {"floats": [], "8 bits": ["--base-bits=8"], "4 bits": ["--base-bits=4"]}
    sizes = {name: planned(*on_gpu, *options, program=GPT)[0] for name, options in bases.items()}
    expect(sizes["floats"] > sizes["8 bits"] + 0.3 > sizes["4 bits"] + 0.4, sizes)
    chooses = (*on_gpu, "--base-bits=budget", "--budget")
    for name, size in sizes.items():
        plan, out = planned(*chooses, f"{size + 0.1:.1f}MB", program=GPT)
        expect(f"--base-bits budget: linear layers in {name}" in out and plan == size, name, plan, size, out)
    refused(GPT, *chooses, f"{sizes['4 bits'] - 0.1:.1f}MB", "--plan", saying="budget: even 4 bits do not fit")
    refused(GPT, *adapts, "--base-bits=budget", saying="for a --budget, but there is none: set --budget")
    status, out, err = call(GPT, *adapts, "--base-bits=budget", "--budget=1GB", "--epochs=1")
    expect(status == 0 and "linear layers in floats\n" in out, out, err)
    loads = ("--model", path("model"), "--adapter", path("adapter"), "--generate=the ", "--tokens=10",
             "--temperature=0")
    for budget, name in ("3MB", "8 bits"), ("40MB", "floats"):
        status, out, err = call(GPT, *loads, "--base-bits=budget", "--budget", budget)
        expect(status == 0 and f"linear layers in {name}" in out and "\nthe " in out, out, err)


def answers(model, loads):
    """Checks how generated texts begin and end, with a tokenizer of the 256 bytes and one more token."""
    def write(name, value):
        with open(os.path.join(model, name), "w") as f:
            json.dump(value, f)
    def said(prompt, *options):
        command = (*loads[:1], "--generate", prompt, *loads[3:], "--model", model, *options)
        out = subprocess.run(command, stdout=subprocess.PIPE, check=True, timeout=300).stdout
        expect(out.decode(errors="replace").encode() == out, "not UTF-8:", prompt, out)
        return out.decode()
    vocab = {**{f"<0x{k:02X}>": k for k in range(256)}, "<end>": 256}
    tokenizer = {"model": {"type": "BPE", "vocab": vocab, "merges": [], "byte_fallback": True},
                 "decoder": {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"}]}}
    write("tokenizer.json", tokenizer)
    write("tokenizer_config.json", {"eos_token": "<end>"})
    whole = said("the ", "--tokens=8")
    ends = [ord(whole[6]), ord(whole[7])]
    for name in "config.json", "generation_config.json": # the second file overrides the first
        old = json.loads(contents(model, "config.json"))
        write(name, {**old, "eos_token_id": ends if name == "config.json" else ends[1:]})
        expect(said("the ") == whole[:whole.index(chr(ends[name != "config.json"]), 4) + 1] + "\n",
               name, repr(whole), repr(said("the ")))
    os.remove(os.path.join(model, "generation_config.json"))
    # Bytes that form no character are printed as U+FFFD, and the text before them is not repeated. The last
    # two prompts end in a character that begins like U+FFFD.
    for prompt in "caf\u00e9", "\uff71", "x \uffe5":
        for seed in range(4):
            out = said(prompt, "--temperature=9", f"--seed={seed}")
            expect(out.startswith(prompt) and len(out) > len(prompt) + 1, prompt, repr(out))
            behind = out[len(prompt):]
            expect("\ufffd" in behind or all(ord(c) < 128 for c in behind), prompt, repr(out))
    # If a text begins with the token that the tokenizer adds before texts, the token occurs only once.
    front = [{"SpecialToken": {"id": "<end>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    post = {"type": "TemplateProcessing", "single": front, "special_tokens": {"<end>": {"ids": [256]}}}
    added = [{"id": 256, "content": "<end>", "special": True}]
    write("tokenizer.json", {**tokenizer, "added_tokens": added, "post_processor": post})
    expect(said("<end>the ") == "<end>" + said("the "), said("<end>the "), said("the "))
    write("tokenizer.json", {**tokenizer, "added_tokens": [{"id": 300, "content": "zebra"}]})
    refused(GPT, "--generate=a zebra", "--model", model, saying="the id is 300, but must be 0 to 256")
    with open(os.path.join(model, "zebras.txt"), "w") as f:
        f.write("one zebra\n")
    refused(GPT, "--model", model, "--data", os.path.join(model, "zebras.txt"), "--out", model + "_tuned",
            saying="has the token 300 ('zebra'), but the model has only 257 tokens")


def picture(path, number, height=9, width=12):
    """Writes a PPM picture, which the example reads with and without stb_image.h."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "wb") as f:
        f.write(b"P6 %d %d 255\n" % (width, height))
        f.write(bytes((number * 37 + k * (1 + number % 5)) % 256 for k in range(height * width * 3)))


@check
def folders_of_images(folder):
    photos, run = os.path.join(folder, "photos"), os.path.join(folder, "run")
    for k in range(24):
        picture(os.path.join(photos, "cat" if k < 12 else "dog", f"{k}.ppm"), k)
    plan = [IMAGES, "--data", photos, "--out", run, "--plan"]
    status, clean, err = call(*plan)
    expect(status == 0 and "20 images to train on, 2 for validation" in clean, clean, err)
    expect("note" not in clean, clean)
    picture(os.path.join(photos, "__MACOSX", "._1.ppm"), 1)
    picture(os.path.join(photos, "__MACOSX", "2.ppm"), 1)
    picture(os.path.join(photos, "cat", "._1.ppm"), 1)
    os.mkdir(os.path.join(photos, "empty"))
    with open(os.path.join(photos, "README"), "w") as f:
        f.write("photos")
    status, out, err = call(*plan)
    note = f"note: left out of '{photos}': 'README', '__MACOSX', 'empty' (has no images), 1 hidden\n"
    expect(status == 0 and out == note + clean, out, err)
    bad = os.path.join(photos, "dog", "13x.ppm")
    with open(bad, "w") as f:
        f.write("no image")
    os.mkdir(os.path.join(photos, "dog", "more"))
    refused(*plan, saying=f"'{bad}' cannot be read (")
    refused(*plan, saying=", and 1 more cannot be read: remove files")
    status, out, err = call(*plan, "--skip-unreadable")
    expect(status == 0 and f"note: left out: '{bad}' cannot be read (" in out, out, err)
    expect(out.endswith(clean), out)
    with open(os.path.join(photos, "dog", "14x.ppm"), "wb") as f:  # a valid header without pixels
        if "without stb_image.h" in " ".join(call(IMAGES, "--help")[1].split()):
            f.write(b"P6 4 4 255\ncut off")
        else:
            f.write(b"\x89PNG\r\n\x1a\n\0\0\0\x0dIHDR\0\0\0\4\0\0\0\4\x08\2\0\0\0crc.\0\0\1\0IDATcut off")
    status, out, err = call(*plan, "--skip-unreadable")
    expect(status == 0 and "and 2 more cannot be read" in out and out.endswith(clean), out, err)
    shutil.rmtree(photos)
    for split in "train", "test":
        for k in range(8):
            picture(os.path.join(photos, split, "cat" if k < 4 else "dog", f"{k}.ppm"), k)
    status, out, err = call(*plan[:-1], "--epochs=1", "--batch=4", "--augment", "--skip-unreadable")
    expect(status == 0 and "on 8 test images" in out, out, err)
    path = os.path.join(photos, "test", "cat", "0.ppm")
    status, out, err = call(IMAGES, "--out", run, "--predict", path)
    expect(status == 0 and out.endswith(path + "\n"), out, err)


# JPEG + UPRIGHT is a picture of 2 x 3 blocks, each of one grey. A second picture is rotated to the left.
JPEG = ("/9j/4AAQSkZJRgABAQAAAQABAAD/2wBDABALDA4MChAODQ4SERATGCgaGBYWGDEjJR0oOjM9PDkzODdASFxOQERXRT"
        "c4UG1RV19iZ2hnPk1xeXBkeFxlZ2P/wAAL")
UPRIGHT = ("CAAQABgBAREA/8QAFQABAQAAAAAAAAAAAAAAAAAABgf/xAAUEAEAAAAAAAAA"
           "AAAAAAAAAAAA/9oACAEBAAA/ABKtBClpKRv/2Q==")
TURNED = ("CAAYABABAREA/8QAFgABAQEAAAAAAAAAAAAAAAAABQcG/8QAFBABAAAAAAAA"
          "AAAAAAAAAAAAAP/aAAgBAQAAPwAwo0aci1uf/9k=")


@check
def jpegs_are_upright(folder):
    run = os.path.join(folder, "run")
    status, out, err = call(IMAGES, "--out", run, "--train=40", "--test=20", "--epochs=1")
    expect(status == 0, err)
    exif = b"\xff\xe1\x00\x22Exif\0\0MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01\0\x06\0\0\0\0\0\0"
    upright, turned = (base64.b64decode(JPEG + part) for part in (UPRIGHT, TURNED))
    found = []
    for k, data in enumerate((upright, turned[:2] + exif + turned[2:], turned)):
        path = os.path.join(folder, f"{k}.jpg")
        with open(path, "wb") as f:
            f.write(data)
        if "without stb_image.h" in " ".join(call(IMAGES, "--help")[1].split()):
            refused(IMAGES, "--out", run, "--predict", path, saying="apt-get install libstb-dev")
            return
        status, out, err = call(IMAGES, "--out", run, "--predict", path)
        expect(status == 0, err)
        found.append(out.split()[:-1])
    expect(found[0] == found[1] != found[2], found)


@check
def images_of_cifar_keep_their_size(folder):
    data = os.path.join(folder, "cifar")
    os.mkdir(data)
    for name in "data_batch_1.bin", "test_batch.bin":
        with open(os.path.join(data, name), "wb") as f:
            for k in range(20):
                f.write(bytes([k % 10]) + bytes((k * 11 + p) % 256 for p in range(3072)))
    options = ["--data", data, "--vit=Ti/4", "--batch=4", "--out", os.path.join(folder, "plan")]
    expect(planned(*options, program=IMAGES) == planned(*options, "--size=32", program=IMAGES))


@check
def what_asks_for_stb_is_built_again_with_it(folder):
    stamp = os.path.join(folder, "b", "stb")

    def made(include):
        environment = {k: v for k, v in os.environ.items() if k not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")}
        done = subprocess.run(["make", "B=" + os.path.dirname(stamp), stamp], stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT, text=True, env={**environment, "CPATH": include})
        expect(done.returncode == 0, done.stdout)
        with open(stamp) as f:
            return f.read(), os.stat(stamp).st_mtime_ns
    os.makedirs(os.path.join(folder, "include", "stb"))
    before, again = made(folder), made(folder)
    open(os.path.join(folder, "include", "stb", "stb_image.h"), "w").close()
    after = made(os.path.join(folder, "include"))
    expect(before == again and before[0] != after[0] and folder in after[0], before, again, after)
    rules = subprocess.run(["make", "-pn", "B=" + os.path.dirname(stamp), stamp], stdout=subprocess.PIPE,
                           stderr=subprocess.DEVNULL, text=True).stdout
    expect(re.search(r"/b/vit_l16\.o: .*/b/stb", rules), "no rule")


@check
def conversations_are_learnt_and_continued(folder):
    path = lambda name: os.path.join(folder, name)
    shutil.copytree(os.path.join("tests", "golden", "lm", "llama"), path("model"))
    tokens = ["<s>", "</s>", *"abcdefghijklmnopqrstuvwxyz :"]
    json_of = {
        "tokenizer.json": {"added_tokens": [{"id": k, "content": tokens[k], "special": True} for k in range(2)],
                           "decoder": {"type": "Fuse"},
                           "model": {"type": "BPE", "merges": [], "unk_token": "z",
                                     "vocab": {token: k for k, token in enumerate(tokens)}}},
        "tokenizer_config.json": {"eos_token": "</s>", "chat_template":
                                  "{% for m in messages %}{{ m.role + ':' + m.content + '</s>' }}{% endfor %}"
                                  "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"}}
    for name, content in json_of.items():
        with open(os.path.join(path("model"), name), "w") as f:
            json.dump(content, f)
    turns = [{"role": role, "content": text} for text, answer in (("hi", "yes"), ("bye", "no"))
             for role, text in (("user", text), ("assistant", answer))]
    with open(path("chats.jsonl"), "w") as f:
        for _ in range(20):
            f.writelines(json.dumps({"messages": m}) + "\n" for m in (turns, turns[:2], turns[2:]))
    command = (GPT, "--model", path("model"), "--data", path("chats.jsonl"), "--threads=1", "--lr=0.01", "--batch=6")
    status, out, err = call(*command, "--whole", "--length=64", "--epochs=12", "--held-out=0.1", "--out", path("run"))
    expect(status == 0 and "saved: " in out and "bits per byte" not in out, status, out, err)
    done = subprocess.run((GPT, "--out", path("run"), "--chat", "--temperature=0", "--tokens=9", "--threads=1"),
                          input="hi\nbye\n", capture_output=True, text=True, timeout=300)
    expect(done.returncode == 0 and done.stdout == "yes\nno\n", done.returncode, done.stdout, done.stderr)
    done = subprocess.run((GPT, "--out", path("run"), "--chat", "--length=15", "--threads=1"),
                          input="what is it\n", capture_output=True, text=True, timeout=300)
    expect(done.returncode == 1 and "but must have fewer than 15: set --length" in done.stderr, done.stderr)
    status, out, err = call(*command, "--all-tokens", "--length=32", "--epochs=1", "--out", path("all"))
    expect(status == 0, status, out, err)
    refused(*command, "--length=32", "--beta=0.2", "--out", path("not"), saying="--beta is for pairs of answers, but")
    refused(GPT, "--chat", "--generate=x", saying="--generate and --chat exclude each other: leave one out")
    refused(GPT, "--chat", "--data=x", saying="--generate trains nothing, nor does --chat")
    with open(path("few.jsonl"), "w") as f:
        f.writelines(json.dumps({"messages": turns}) + "\n" for _ in range(3))
    status, out, err = call(*command[:3], "--data", path("few.jsonl"), "--length=64", "--epochs=1", "--out", path("few"))
    expect(status == 0 and "note: --held-out 0.05 is fewer tokens than the last conversation has" in out, out, err)
    refused(*command[:3], "--data", path("chats.jsonl"), "--whole", "--across", "--out", path("not"),
            saying="so that --across has no meaning")
    refused(*command[:3], "--data", path("chats.jsonl"), "--whole", "--length=1", "--out", path("not"),
            saying="set a larger --length")
    with open(path("pairs.jsonl"), "w") as f:
        f.writelines(json.dumps({"prompt": "a", "chosen": "b", "rejected": "c"}) + "\n" for _ in range(9))
    pairs = (*command[:3], "--data", path("pairs.jsonl"), "--length=32", "--out", path("not"))
    refused(*pairs, "--across", saying="a window is one pair of answers, so that --across has no meaning")
    refused(*pairs, "--all-tokens", saying="line 1: --all-tokens learns all tokens of conversations, but of pairs")
    done = subprocess.run((GPT, "--out", path("run"), "--chat", "--temperature=0", "--tokens=9", "--threads=1"),
                          input=b"h\xff\nbye\n", capture_output=True, timeout=300)
    expect(done.returncode == 0 and done.stdout == b"no\n" and
           b"note: a line is left out: 'standard input', line 1" in done.stderr, done)
    done = subprocess.run((GPT, "--out", path("run"), "--chat", "--threads=1"), input="a" * 5000 + "\n",
                          capture_output=True, text=True, timeout=300)
    expect(done.returncode == 1 and re.search(r"fewer than \d+, the model's positions: begin anew", done.stderr), done)
    with open(path("gpt.jsonl"), "w") as f:
        json.dump({"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yes"}]}, f)
    refused(*command[:3], "--data", path("gpt.jsonl"), "--out", path("not"),
            saying='rename the roles "human" and "gpt" to "user" and "assistant"')
    refused(TEXT, "--model", path("model"), "--out", path("not"), saying="tt_lm_load_head makes a classifier of a decoder")


@check
def predicting_needs_a_trained_model(folder):
    for program in (TEXT, IMAGES):
        refused(program, "--out", os.path.join(folder, "none"), "--predict", "x",
                saying="none' holds no trained model: one is saved when the first epoch ends")


@check
def sources_are_narrow_and_short(folder):
    for name in sorted(os.listdir("examples")):
        if name.endswith((".c", ".h")):
            with open(os.path.join("examples", name)) as f:
                for number, line in enumerate(f, 1):
                    expect(len(line) <= 111, f"examples/{name}, line {number} has {len(line) - 1} columns")
    for name, most in ("hello", 90), ("distilbert_imdb", 200), ("gpt", 200), ("vit_l16", 200):
        with open(f"examples/{name}.c") as f:
            lines = len(f.readlines())
        expect(lines <= most, f"examples/{name}.c has {lines} lines, more than {most}")


def main():
    only = sys.argv[1:]
    unknown = set(only) - {function.__name__ for function in checks}
    if unknown:
        print(f"FAILED check_examples: there is no check {', '.join(sorted(unknown))}\n0 passed, 1 failed")
        return 1
    for program in TEXT, IMAGES, GPT, HELLO:
        if not os.path.exists(program):
            print(f"FAILED check_examples: {program} is not built\n0 passed, 1 failed")
            return 1
    for function in checks:
        name = "examples_" + function.__name__
        if only and function.__name__ not in only:
            continue
        with tempfile.TemporaryDirectory() as folder:
            try:
                function(folder)
            except (Wrong, OSError, subprocess.SubprocessError, AttributeError) as wrong:
                counts["FAILED"] += 1
                print(f"FAILED {name}: {' '.join(str(wrong).split())}", flush=True)
            else:
                counts["ok"] += 1
                print(f"ok {name}", flush=True)
    print(f"{counts['ok']} passed, {counts['FAILED']} failed")
    return 1 if counts["FAILED"] else 0


if __name__ == "__main__":
    sys.exit(main())
