#!/usr/bin/env python3
"""Checks that the instructions of README.md, docs/, bench/README.md and CONTRIBUTING.md work. Standard
library only; run from the repository's root.

    python3 tests/check_readme.py

B: folder of the built examples (build), CC: compiler (cc), both from the environment.


  - every ```c block compiles unchanged, with -Werror; a block marked ```c run must also run, end with 0 and
    print the words of the block ```output, if that comes next; a block marked ```c resume must also, when it
    is killed (after the step that its argument names) and started again, print and save the same; a block
    marked ```c tune trains a tiny model on a table, and one marked
    ```c predict classifies a text with such a model
  - the Makefile has every `make TARGET` and VARIABLE=... of a ```sh block or in `backticks`
  - every --flag of a command in a ```sh block or in `backticks` is in that program's --help (for a .py file,
    and for a bench, which the tests do not build: in its source)
  - the parser of an example accepts every flag of its --help, as --flag value and --flag=value, and refuses
    other flags
  - in README.md and docs/, every --flag that stands alone in `backticks` is in the --help of an example
  - every relative link leads to a file, and one with an #anchor to a heading of that file
  - README.md has a link to each page of docs/; lines of text in docs/ have at most 110 columns
"""
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
FLAG = r"--[a-z][a-z0-9-]*"
PAGES = sorted(glob.glob("docs/*.md"))
KINDS = {"run", "resume", "tune", "predict"} # marks of ```c blocks whose programs run
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


def check_snippets(text, name, folder):
    """Runs the marked programs. Returns the marks of the programs that ran."""
    ran, shown = set(), list(blocks(text))
    for k, (line, info, body) in enumerate(shown):
        if info[:1] != ["c"]:
            continue
        source, program = os.path.join(folder, f"snippet_{line}.c"), os.path.join(folder, f"snippet_{line}")
        with open(source, "w") as f:
            f.write(body)
        run = KINDS & set(info)
        ran |= run
        if set(info) - KINDS - {"c"}:
            check(f"{name}_mark_line_{line}", [f"there is no mark {' '.join(info[1:])}"])
        # Compiles only portable kernels and does not optimise, because compiling takes longer than running.
        status, said = call(*CC, "-O0", "-DTT__OPTIMIZED=true", "-DTINYTRAIN_NO_AVX2", "-std=c99", "-Wall",
                            "-Wextra", "-Wpedantic", "-Werror", "-I.", source, "-o",
                            *([program, "-lm", "-lpthread"] if run else [program + ".o", "-c"]))
        if status == 0 and "run" in info:
            status, said = call(program)
            if shown[k + 1:] and shown[k + 1][1] == ["output"]:
                check(f"{name}_output_line_{line}",
                      [f"it prints {said}"] if said.split() != shown[k + 1][2].split() else [])
        if status == 0 and "resume" in info:
            check_resume(program, name, folder, line)
        if status == 0 and "predict" in info:
            check_predict(program, name, folder, line)
        if status == 0 and "tune" in info:
            check_tune(program, name, folder, line)
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


def small_model(to):
    """Writes the folder of a tiny MiniLM with a vocabulary. Returns its path."""
    shutil.copytree("tests/golden/minilm", to)
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
    check("programs_of_each_kind", [f"no program is marked ```c {kind}" for kind in
                                    sorted(KINDS - ran)])
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
