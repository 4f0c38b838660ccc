#!/usr/bin/env python3
"""Writes the samples of tasks: requests.tsv (several labels), stays.tsv (scores of pairs), visits.conll (tags of words),
questions.tsv (pairs of similar meaning).

    python3 examples/data/make_tasks.py [--out FOLDER]

Needs only the standard library; the files are the same on every machine. The sentences are combined from the phrases in this
file, which were written for this project and have its license.
"""
import argparse
import os

HERE = os.path.dirname(os.path.abspath(__file__))
REQUESTS = {
    "delivery": ["The parcel has not arrived yet.", "When does my parcel come?", "The courier left the box outside.",
                 "My package is a week late."],
    "refund": ["I want my money back.", "Please send me a refund.", "Can you return the amount to my card?",
               "I have not got the refund yet."],
    "damage": ["The glass is broken.", "There is a crack in the lid.", "It fell apart on the first day.",
               "One handle came off at once."],
    "praise": ["Thank you, your team is very kind.", "I love the colour.", "The quality is wonderful.",
               "This is the best shop I know."]}
ROOMS = [("The room was filthy and loud", 1), ("The room smelled of smoke", 1), ("The bed was too small", 2),
         ("The window did not close", 2), ("The room was plain", 3), ("The room was like the pictures", 3),
         ("The room was clean and quiet", 4), ("The bed was soft", 4), ("The room was wonderful, with a view of the sea", 5),
         ("We had the best room of our lives", 5)]
MEALS = [("the breakfast was awful.", 1), ("the bread was stale.", 1), ("the coffee was weak.", 2),
         ("the breakfast was late.", 2), ("the breakfast was as usual.", 3), ("there was bread and jam.", 3),
         ("the eggs were fresh.", 4), ("the breakfast was good.", 4), ("the breakfast was perfect.", 5),
         ("the cook is a great artist.", 5)]
PEOPLE = ["Anna", "Ben Carter", "Clara", "David", "Mrs Ellis", "Frank Hall", "Grace", "Henry Moore"]
PLACES = ["Paris", "New York", "Rome", "Lake Garda", "London", "Berlin", "Hill Street", "Oslo"]
VISITS = ["{P} lives in {L} .", "Yesterday {P} met {P} at the station of {L} .", "We took the train from {L} to {L} .",
          "Did {P} call you ?", "In {L} it rained all day , said {P} .", "The old house was sold last week .",
          "{P} and {P} sing in a choir .", "Nobody likes the new bridge in {L} ."]

TOWNS = ["Paris", "Rome", "London", "Berlin", "Oslo", "Vienna", "Madrid", "Athens", "Dublin", "Prague", "Lisbon", "Warsaw"]
QUESTIONS = [("When does the museum in {T} open?", "The museum of {T} opens at nine."),
             ("How do I get to the station in {T}?", "A bus goes from the centre of {T} to the trains."),
             ("Where can I swim in {T}?", "{T} has a pool beside the park."),
             ("What does a room in {T} cost?", "The hotels of {T} ask ninety for a night."),
             ("Is there a doctor in {T} at night?", "The hospital in {T} never closes."),
             ("Which food is {T} known for?", "People in {T} eat soup and dark bread."),
             ("Does it rain much in {T}?", "The weather of {T} is mostly dry."),
             ("Can my dog come along to {T}?", "Animals are welcome in {T}, even in the tram."),
             ("Who built the old bridge in {T}?", "A king of the past gave {T} its bridge."),
             ("Are the shops in {T} open on Sunday?", "On Sunday you can buy nothing in {T}."),
             ("Is there music in {T} in summer?", "In July {T} has concerts in the open air."),
             ("Where do I buy a ticket for the tram in {T}?", "Machines in {T} sell tickets at each stop.")]


def mixed(k, salt):
    """Returns a number that depends on both arguments alone."""
    x = (k * 2654435761 + salt * 40503 + 977) % 2**32
    x = (x ^ (x >> 15)) * 2246822519 % 2**32
    return (x ^ (x >> 13)) >> 8


def split(k):
    return "test" if k % 6 == 5 else "validation" if k % 6 == 2 else "train"


def requests():
    names = list(REQUESTS)
    rows = ["text\tlabel\tsplit"]
    for k in range(180):
        there = [n for j, n in enumerate(names) if mixed(k, j) % 5 < 2]
        text = " ".join(REQUESTS[n][mixed(k, 10 + j) % 4] for j, n in enumerate(there))
        rows.append(f"{text or 'What are your opening hours?'}\t{','.join(there)}\t{split(k)}")
    return rows


def stays():
    rows = ["text\ttext_pair\tlabel\tsplit"]
    for k in range(180):
        room, meal = ROOMS[mixed(k, 20) % 10], MEALS[mixed(k, 21) % 10]
        rows.append(f"{room[0]}.\t{meal[0].capitalize()}\t{(room[1] + meal[1]) / 2:g}\t{split(k)}")
    return rows


def visits():
    rows, names = [], {"{P}": ("PERSON", PEOPLE), "{L}": ("PLACE", PLACES)}
    for k in range(160):
        for w, word in enumerate(VISITS[mixed(k, 30) % len(VISITS)].split()):
            if word not in names:
                rows.append(f"{word} O")
                continue
            kind, of = names[word]
            rows += [f"{part} {'I' if i else 'B'}-{kind}" for i, part in enumerate(of[mixed(k, 40 + w) % 8].split())]
        rows.append("")
    return rows


def questions():
    rows = ["text\ttext_pair\tsplit"]
    for k in range(144):
        question, answer = QUESTIONS[k // 12]
        town = TOWNS[k % 12]
        rows.append(f"{question.replace('{T}', town)}\t{answer.replace('{T}', town)}\t{split(mixed(k, 50))}")
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", default=HERE, metavar="FOLDER", help="folder of the four files")
    out = parser.parse_args().out
    for name, rows in ("requests.tsv", requests()), ("stays.tsv", stays()), ("visits.conll", visits()), \
            ("questions.tsv", questions()):
        with open(os.path.join(out, name), "w", encoding="utf-8", newline="\n") as f:
            f.write("\n".join(rows) + "\n")


if __name__ == "__main__":
    main()
