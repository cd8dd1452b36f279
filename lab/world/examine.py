"""Examines a model on the small world: exact answers at temperature 0, in wordings and on items it never saw.

    python lab/world/examine.py MODEL --count 200 [--seed 2] [--show 2]

Knows: how answers are compared. Stories and conversations have no single right answer; of them it says only whether the
answer ended and stayed with one speaker.
"""

from __future__ import annotations

import argparse
import random
import re
import sys
from collections import defaultdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from forerun import LLM, SamplingParams
from world import make

OPEN = ("stories", "talk")  # kinds without one right answer
OTHER_SPEAKER = re.compile(r"(^|\n)(user|assistant|system|User|Assistant|Human)\b:?\s*(\n|$)")


def main() -> None:
    """Ask every question and print the share of right answers for each kind."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--count", type=int, default=200, help="questions of each kind")
    parser.add_argument("--seed", type=int, default=2)
    parser.add_argument("--show", type=int, default=0, help="print so many wrong answers of each kind")
    options = parser.parse_args()
    asked = list(make.exam(random.Random(options.seed), options.count))
    llm = LLM(options.model, drafter="suffix")
    conversations = [[{"role": "user", "content": line["question"]}] for line in asked]
    outputs = llm.chat(conversations, SamplingParams(max_tokens=400, temperature=0))
    right: dict[str, int] = defaultdict(int)
    wrong: dict[str, list[tuple[str, str, str]]] = defaultdict(list)
    for line, output in zip(asked, outputs, strict=True):
        answer = output.outputs[0]
        if line["kind"] in OPEN:
            good = answer.finish_reason == "stop" and not OTHER_SPEAKER.search(answer.text)
        else:
            good = answer.text.strip() == line["answer"].strip()
        right[line["kind"]] += good
        if not good:
            wrong[line["kind"]].append((line["question"], line["answer"], answer.text))
    for kind in make.EXAM:
        print(f"{kind:14} {right[kind] / options.count:6.1%}" + (" (ended, one speaker)" if kind in OPEN else ""))
        for question, wanted, given in wrong[kind][: options.show]:
            print(f"    asked  {question!r}\n    wanted {wanted!r}\n    given  {given!r}")


if __name__ == "__main__":
    main()
