#!/usr/bin/env python3
"""Checks --plan of an example: --plan trains nothing, and the picture is XML that shows the facts of the
text. Standard library only; run from the repository's root.

    python3 tests/check_plan.py              B: folder of the built examples (build), from the environment
"""
import os
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree

B = os.environ.get("B", "build")
SVG = "{http://www.w3.org/2000/svg}"
failed = passed = 0


def check(name, wrong):
    global failed, passed
    failed, passed = failed + bool(wrong), passed + (not wrong)
    print(f"FAILED {name}: {'; '.join(wrong)}" if wrong else f"ok {name}", flush=True)


def heights(path, at):
    """Returns the height at x of an area whose outline is a polygon of steps."""
    x = y = 0
    for sign, number in re.findall(r"([hvHV])(-?\d+)", path):
        if sign == "h" and x + int(number) > at or sign == "H":
            return y
        x, y = x + int(number) * (sign == "h"), y + int(number) * (sign == "v")
    return y


def check_picture(device, text, path):
    wrong = []
    size = os.path.getsize(path)
    root = xml.etree.ElementTree.parse(path).getroot()
    inside = root.find(SVG + "g")
    width = max(int(n)
                for n in re.findall(r"H(\d+)", " ".join(p.get("d") for p in inside.iter(SVG + "path"))))
    tags = {e.tag.replace(SVG, "") for e in root.iter()}
    words = (" ".join(e.text or "" for e in root.iter(SVG + "text")) +
             " ".join(e.tail or "" for e in root.iter(SVG + "tspan")))
    if root.tag != SVG + "svg" or tags - {"svg", "g", "rect", "path", "circle", "text", "tspan", "title"}:
        wrong.append(f"elements {sorted(tags)}")
    if size > 60000:
        wrong.append(f"{size} bytes")
    if f"on {device}" not in words:
        wrong.append(f"'{device}' is not in '{words[:100]}'")
    peak, last, op = re.search(r"peak at instruction (\d+) of (\d+): (\w+)", text).groups()
    if not re.search(rf"at {peak}: {op}", words):
        wrong.append(f"the peak {peak}, {op}, is not in the picture")
    bound = float(re.search(r"lower bound ([\d.]+)", text).group(1))
    at_peak = dict(re.findall(r"^  (\w+) +([\d.]+) MB$", text, re.M))
    areas = {p.find(SVG + "title").text: heights(p.get("d"), width * (int(peak) + 0.5) / int(last))
             for p in inside.findall(SVG + "path") if len(p)}
    whole, below = max(areas.values(), default=0), 0
    # The sort leaves areas of equal height in the order of drawing, so that an area without height follows
    # the area below.
    lowest_first = reversed(list(areas.items()))
    for category, height in sorted(lowest_first, key=lambda area: area[1]):
        drawn, said = bound * (height - below) / max(1, whole), float(at_peak.get(category, 0))
        below = height
        if not abs(drawn - said) <= 0.1 + 0.002 * bound:
            wrong.append(f"{category}: {drawn:.1f} MB are drawn, {said} are said")
    if set(at_peak) - set(areas):
        wrong.append(f"{set(at_peak) - set(areas)} are not drawn")
    check(f"plan_picture_{device}", wrong)


def main():
    for device in ("cpu", "cuda", "cuda*4"):
        with tempfile.TemporaryDirectory() as folder:
            out = os.path.join(folder, "out")
            done = subprocess.run([f"{B}/distilbert_imdb", "--plan", "--device", device, "--accumulate", "2",
                                   "--out", out], stdin=subprocess.DEVNULL,
                                  stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300)
            files = os.listdir(out) if os.path.isdir(out) else []
            wrong = [f"status {done.returncode}: {done.stdout[-300:]}"] if done.returncode else []
            wrong += [f"--out holds {files}"] if files != ["plan.svg"] else []
            head = f"memory plan for {device}" + (" (data 4, zero 1): every rank " if "*" in device else ": ")
            wrong += ["no plan is printed"] if head not in done.stdout else []
            check(f"plan_{device}", wrong)
            if not wrong:
                check_picture(device, done.stdout, os.path.join(out, "plan.svg"))
    print(f"{passed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
