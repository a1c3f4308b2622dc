"""Is anything of the prompts we measure on in the text we train on?

    python scripts/check_overlap.py --target SMOLLM2 --prompts traces/samples/prompts.jsonl --text text.jsonl.gz

Compared are whole user turns (exact, letter case and spaces aside) and all runs of eight words, against user turns
and answers. Exit 1 where any prompt is found.
"""

import argparse
import json
import re
import sys
from pathlib import Path

from tokenizers import Tokenizer
from write_text import BEGIN, END, read_rows

RUN = 8


def words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def runs(text: str) -> set[tuple[str, ...]]:
    """All runs of eight words; a shorter text has none."""
    found = words(text)
    return {tuple(found[i : i + RUN]) for i in range(len(found) - RUN + 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, required=True, help="folder with tokenizer.json")
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--text", type=Path, action="append", required=True)
    args = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(args.target / "tokenizer.json"))
    prompts = {row["id"]: row["prompt"] for row in map(json.loads, args.prompts.read_text().splitlines())}
    whole = {" ".join(words(prompt)): key for key, prompt in prompts.items()}
    pieces = {run: key for key, prompt in prompts.items() for run in runs(prompt)}
    found: set[str] = set()
    conversations = 0
    for path in args.text:
        for row in read_rows(path):
            conversations += 1
            turn = (
                tokenizer.decode(row["input_ids"], skip_special_tokens=False).split(f"{BEGIN}user\n")[-1].split(END)[0]
            )
            answer = tokenizer.decode(row["output_ids"])
            hits = {whole.get(" ".join(words(turn)))} | {
                pieces.get(run) for text in (turn, answer) for run in runs(text)
            }
            found |= {key for key in hits if key}
    print(f"{len(prompts)} prompts, {conversations} conversations: {len(found)} prompts found in them {sorted(found)}")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
