"""What a prediction brings: answers that repeat a text of which a few tokens are changed, as an edited file does.

    python benchmarks/edits.py --model MODEL [--tokens 300] [--changed 0.05] [--num 4] [--drafter suffix]
        [--max-draft-tokens 24] [--temperature 0.7]

Which edits a model can make is not what is measured, so the edit runs backwards: the model's own answer to a prompt
is the edited text, and what is predicted is that answer with a share of its tokens replaced, left out or added to.
Everything is then as in an edit: the answer follows the prediction but for these places, and nothing else of it is
known beforehand. Three engines on the same weights take turns: plain, the drafter, the drafter with the prediction; a
first text does not count. At temperature 0 small models repeat themselves, which drafters exploit without any
prediction, so that is not the default. The texts must be equal. Nothing else should run meanwhile.

Writes benchmarks/results/DATE-edits.json, prints a table, exits with 1 if texts differ.
"""

from __future__ import annotations

import argparse
import json
import random
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from forerun import LLM, SamplingParams
from forerun.bench.interval import geometric_mean, interval_of
from forerun.bench.machine import describe_machine, machine_line
from forerun.core import CompletionOutput

RESULTS = Path(__file__).with_name("results")
TOPICS = (
    "a fox",
    "an old teacher",
    "the sea",
    "a red bicycle",
    "a market in spring",
    "two small dogs",
    "a long journey",
)
PLAIN, DRAFTED, PREDICTED = "plain", "without a prediction", "with a prediction"


def main() -> None:
    """Measure, keep, print."""
    given = options()
    plain = LLM(given.model, max_num_seqs=1, prefix_caching=False, across_requests=False, keep_learned=False)
    result = {
        **measured(plain, given), "command": shlex.join(["python", "benchmarks/edits.py", *sys.argv[1:]]),
        "machine": describe_machine(plain.kernels),
    }  # fmt: skip
    given.out.mkdir(exist_ok=True)
    path = given.out / f"{result['machine']['date']}-edits.json"
    path.write_text(json.dumps(result, indent=1) + "\n", "utf-8")
    print(markdown(result))
    sys.exit(0 if result["equal"] else 1)


def options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="What a prediction of the answer brings.")
    parser.add_argument("--model", default="mini")
    parser.add_argument("--tokens", type=int, default=300, help="of an answer")
    parser.add_argument("--changed", type=float, default=0.05, help="share of the tokens that the prediction has wrong")
    parser.add_argument("--num", type=int, default=4, help="texts")
    parser.add_argument("--drafter", default="suffix", help="one that reads predictions, or a portfolio with it")
    parser.add_argument("--max-draft-tokens", type=int, default=24)
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULTS, help="a folder")
    return parser.parse_args()


def measured(plain: LLM, given: argparse.Namespace) -> dict[str, Any]:
    """Figures of each engine, over the texts."""
    drafting = {"max_draft_tokens": given.max_draft_tokens, "across_requests": False, "keep_learned": False}
    engines = {PLAIN: plain, **{name: plain.with_drafter(given.drafter, **drafting) for name in (DRAFTED, PREDICTED)}}
    answers: list[dict[str, CompletionOutput]] = []
    wrong: list[int] = []
    for number in range(-1, given.num):
        prompt = f"Write a story about {TOPICS[number % len(TOPICS)]}.\n\n"
        params = SamplingParams(
            temperature=given.temperature, seed=given.seed + number + 1, max_tokens=given.tokens, ignore_eos=True
        )
        truth = answered(plain, prompt, params)
        text = edited(plain, truth.token_ids, given.changed, random.Random(given.seed + number))
        order = list(engines)[number % 3 :] + list(engines)[: number % 3]
        found = {name: answered(engines[name], prompt, params, text if name == PREDICTED else None) for name in order}
        if number >= 0:
            answers.append(found)
            wrong.append(num_wrong(plain.tokenizer.encode(text, add_special_tokens=False), truth.token_ids))
    return {
        "model": given.model, "drafter": given.drafter, "max_draft_tokens": given.max_draft_tokens,
        "temperature": given.temperature, "tokens": [len(found[PLAIN].token_ids) for found in answers],
        "wrong_tokens": wrong,  # of the predictions, as they are cut into tokens
        "equal": all(one.token_ids == found[PLAIN].token_ids for found in answers for one in found.values()),
        "rows": [row_of(name, answers) for name in engines],
    }  # fmt: skip


def answered(llm: LLM, prompt: str, params: SamplingParams, prediction: str | None = None) -> CompletionOutput:
    """One answer. Raises its error, if it has one."""
    [completion] = llm.generate(prompt, params, prediction=prediction)[0].outputs
    if completion.error is not None:
        raise completion.error
    return completion


def edited(llm: LLM, token_ids: Sequence[int], share: float, rng: random.Random) -> str:
    """A text with a share of its tokens changed: replaced by others of the text, left out, or with one added."""
    places = rng.sample(range(len(token_ids)), round(share * len(token_ids)))
    pieces = [[token] for token in token_ids]
    for number, place in enumerate(places):
        other = rng.choice(token_ids)
        pieces[place] = ([other], [], [token_ids[place], other])[number % 3]
    return llm.tokenizer.decode([token for piece in pieces for token in piece])


def num_wrong(predicted: Sequence[int], truth: Sequence[int]) -> int:
    """Tokens of the longer of the two that are not in their longest common subsequence."""
    longest = [0] * (len(truth) + 1)  # of what was read of the prediction, and so many tokens of the truth
    for token in predicted:
        before = longest[:]
        for place, wanted in enumerate(truth, start=1):
            longest[place] = before[place - 1] + 1 if token == wanted else max(before[place], longest[place - 1])
    return max(len(truth), len(predicted)) - longest[-1]


def row_of(name: str, answers: Sequence[Mapping[str, CompletionOutput]]) -> dict[str, Any]:
    """An engine's figures: seconds over those of plain decoding, text by text."""
    own, plain = ([found[which].stats for found in answers] for which in (name, PLAIN))
    whole = [(p.ttft_s + p.decode_s) / (o.ttft_s + o.decode_s) for o, p in zip(own, plain, strict=True)]
    decoding = [p.decode_s / o.decode_s for o, p in zip(own, plain, strict=True)]
    return {
        "engine": name,
        "tokens_per_step": round(sum(o.num_tokens for o in own) / sum(o.num_steps for o in own), 2),
        "speedup": round(geometric_mean(whole), 3),
        "interval": interval_of(whole),
        "decoding": round(geometric_mean(decoding), 3),
        "decoding_interval": interval_of(decoding),
    }


def markdown(result: Mapping[str, Any]) -> str:
    """A table, and what it was taken on."""
    tokens, wrong, machine = result["tokens"], result["wrong_tokens"], result["machine"]
    lines = [
        f"{len(tokens)} texts of {min(tokens)} to {max(tokens)} tokens, of which predictions have {min(wrong)} to "
        f"{max(wrong)} wrong; T = {result['temperature']:g}, {'equal' if result['equal'] else 'DIFFERENT'} texts\n",
        "| | tokens a pass | speed-up | 95% interval | decoding alone |",
        "|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        spread = "-" if row["interval"] is None else "{:.2f}-{:.2f}".format(*row["interval"])
        lines.append(f"| {row['engine']} | {row['tokens_per_step']:.2f} | {row['speedup']:.2f}x | {spread} "
                     f"| {row['decoding']:.2f}x |")  # fmt: skip
    return "\n".join([*lines, f"\n{machine_line(machine)}, {machine['date']}", result["command"]])


if __name__ == "__main__":
    main()
