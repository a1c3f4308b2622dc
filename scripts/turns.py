"""User turns for training conversations; the words are in `turns.toml`.

`opener` gives the first words of a user turn, which the target then finishes itself. `made` fills a template with
words drawn at random and, for tasks that need a text, with a passage the caller supplies. Nothing of
`traces/samples/prompts.jsonl` is among them; `check_overlap.py` holds that.
"""

import tomllib
from pathlib import Path
from random import Random

WORDS: dict[str, list[str]] = tomllib.loads(Path(__file__).with_name("turns.toml").read_text(encoding="utf-8"))
TWICE = ("topic", "name", "place", "job", "thing", "food")  # slots that a template may have two of
ONCE = ("language", "tone", "sentence", "broken", "code", "snippet", "country", "person", "day")
NUMBERS = (("a", 2, 60), ("b", 2, 60), ("c", 61, 900), ("k", 2, 9), ("n", 1, 24), ("year", 1700, 2024))


def opener(random: Random) -> str:
    """First words of a user turn."""
    return random.choice(WORDS["openers"])


def made(random: Random, passages: list[str]) -> str:
    """A hand-made user turn; one in three works on a passage, where there are any."""
    fields = _fields(random)
    if passages and random.random() < 1 / 3:
        fields["passage"], fields["passage2"] = random.choice(passages), random.choice(passages)
        fields["short"] = ". ".join(random.choice(passages).split(". ")[: random.randint(1, 2)])
        return random.choice(WORDS["passage_templates"]).format(**fields)
    return random.choice(WORDS["templates"]).format(**fields)


def _fields(random: Random) -> dict[str, str]:
    """One draw for every slot a template may have."""
    fields: dict[str, str] = {}
    for slot in TWICE:
        fields[slot], fields[f"{slot}2"] = random.sample(WORDS[slot], 2)
    for slot in ONCE:
        fields[slot] = random.choice(WORDS[slot])
    for slot, low, high in NUMBERS:
        fields[slot] = str(random.randint(low, high))
    for slot in ("sql", "bash"):
        fields[slot] = random.choice(WORDS[slot]).format(**fields)
    return fields
