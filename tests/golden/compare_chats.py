#!/usr/bin/env python3
"""Compares what tinytrain.h makes of random conversations by chat templates with what transformers makes:
conversations of texts, with tools, and with contents in parts; with the start of an answer and without.

    python tests/golden/compare_chats.py FOLDER [--chats N] [--seed N]

FOLDER has templates, NAME.jinja, such as trl/chat_templates of the package trl. Prints a line for each template
that does not give the bytes of transformers or does not refuse the same conversations, and how many do.

needs: transformers, jinja2; a C compiler ($CC). Run by hand: 72 templates and 200 conversations take a minute.
"""
import argparse
import collections
import glob
import json
import os
import random
import shlex
import subprocess
import sys
import tempfile

from make_chats import conversation, here, with_tools
from transformers.utils import chat_template_utils as chats

KINDS = ("texts", "tools", "parts")
# Writes, for each template and each line, without and with the start of an answer: T and the bytes of the text,
# F and an error of the conversation, or U and an error of the template; then these bytes.
PROGRAM = r"""
#define TINYTRAIN_IMPLEMENTATION
#include "tinytrain.h"
static char *read_all(const char *path, size_t *n)
{
    FILE *f = fopen(path, "rb");
    char *text = NULL;
    if (f && fseek(f, 0, SEEK_END) == 0) text = malloc((*n = (size_t)ftell(f)) + 1);
    if (text) { rewind(f); text[*n = fread(text, 1, *n, f)] = 0; fclose(f); }
    return text;
}
int main(int argc, char **argv)
{
    static const char config[] = "{\"bos_token\": \"<bos>\", \"eos_token\": \"<eos>\"}";
    tt_context *ctx = tt_open(NULL);
    size_t bytes, n;
    char *lines = read_all(argv[1], &bytes);
    for (int t = 2; t < argc; t++) {
        char *source = read_all(argv[t], &n), *end;
        tt__chat c;
        memset(&c, 0, sizeof c);
        c.jinja.ctx = c.config.ctx = c.map.ctx = ctx;
        c.jinja.unicode = tt__unicode_new(ctx);
        tt__json_parse(&c.config, ctx, "config", 0, config, strlen(config));
        const tt_status parsed = tt__jinja_parse(&c.jinja, ctx, argv[t], source, n);
        for (char *line = lines; (end = strchr(line, '\n')) != NULL; line = end + 1) {
            tt__json j;
            tt__json_parse(&j, ctx, "line", 0, line, (size_t)(end - line));
            const int list = tt__json_get(&j, 0, "messages"), tools = tt__json_get(&j, 0, "tools");
            const tt__chat_messages m = {&j, list, j.nodes[list].count, NULL, tools < 0 ? NULL : &j, tools};
            for (int prompt = 0; prompt < 2; prompt++) {
                tt__jinja_run r;
                memset(&r, 0, sizeof r);
                r.j = &c.jinja;
                c.jinja.failed = parsed != TT_OK;
                const tt_status status = parsed == TT_OK ? tt__chat_render(&c, &r, &m, m.n, prompt) : parsed;
                const char *why = tt_error(ctx), *text = status == TT_OK ? r.out : why;
                n = status == TT_OK ? r.n : strlen(why);
                printf("%c %zu\n", status == TT_OK ? 'T' : status == TT_ERR_FORMAT ? 'F' : 'U', n);
                fwrite(text, 1, n, stdout);
                tt__jinja_end(&r);
            }
            tt__json_free(&j);
        }
    }
    return 0;
}
"""


def outputs(templates, conversations):
    """Returns what the program writes, as pairs of a letter and bytes."""
    with tempfile.TemporaryDirectory() as folder:
        source, program, lines = (os.path.join(folder, name) for name in ("chats.c", "chats", "chats.jsonl"))
        with open(source, "w") as f:
            f.write(PROGRAM)
        with open(lines, "w", encoding="utf-8") as f:
            f.writelines(json.dumps(c, ensure_ascii=False) + "\n" for c in conversations)
        root = os.path.dirname(os.path.dirname(here))
        subprocess.run([*shlex.split(os.environ.get("CC", "cc")), "-O1", "-std=c99", "-w", "-I" + root, source, "-o", program,
                        "-lm", "-lpthread"], check=True)
        data = subprocess.run([program, lines, *templates], check=True, stdout=subprocess.PIPE).stdout
    at = 0
    while at < len(data):
        line = data.index(b"\n", at)
        letter, n = data[at:line].split()
        at = line + 1 + int(n)
        yield letter.decode(), data[line + 1:at]


def main():
    p = argparse.ArgumentParser()
    p.add_argument("folder")
    p.add_argument("--chats", type=int, default=200)
    p.add_argument("--seed", type=int, default=1)
    a = p.parse_args()
    rng = random.Random(a.seed)
    made = {"texts": [conversation(rng) for _ in range(a.chats)], "tools": [with_tools(rng) for _ in range(a.chats)],
            "parts": [conversation(rng) for _ in range(a.chats)]}
    for c in made["parts"]:
        for m in c["messages"]:
            m["content"] = [{"type": "text", "text": m["content"]}]
    templates = sorted(glob.glob(os.path.join(a.folder, "*.jinja"))) or sys.exit(f"{a.folder} has no templates")
    found = outputs(templates, [c for kind in KINDS for c in made[kind]])
    total = collections.Counter()
    for path in templates:
        with open(path, encoding="utf-8", newline="") as f:
            template = chats._compile_jinja_template(f.read())
        template.environment.globals.pop("strftime_now", None) # undefined in tinytrain
        for kind in KINDS:
            counts, first = collections.Counter(), b""
            for c in made[kind]:
                messages = chats._alias_reasoning_fields(chats._normalize_chat_messages(c["messages"]))
                for prompt in (False, True):
                    letter, text = next(found)
                    try:
                        expected = template.render(messages=messages, tools=c.get("tools"), documents=None, bos_token="<bos>",
                                                   eos_token="<eos>", add_generation_prompt=prompt).encode()
                    except Exception:
                        expected = None
                    state = "same" if letter == "T" and text == expected else "both refuse" if letter != "T" and expected is None \
                        else "differ" if letter == "T" else "refused"
                    counts[state] += 1
                    first = first or (text[:120] if state == "refused" else first)
            good = set(counts) <= {"same", "both refuse"}
            state = "no text" if not counts["same"] and good else "as transformers" if good else "not as transformers"
            total[kind, state] += 1
            if state != "as transformers":
                print(os.path.basename(path), kind, dict(counts), first.decode(errors="replace"))
    for (kind, state), n in sorted(total.items()):
        print(f"{kind}: {n} of {len(templates)} templates: {state}")


if __name__ == "__main__":
    main()
