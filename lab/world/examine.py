"""Examines a model on the small world: exact answers, in wordings and on items it never saw.

    python lab/world/examine.py MODEL [--count 200] [--temperature 0] [--open 20] [--speakers 500] [--seed 2] [--show 2]
    python lab/world/examine.py MODEL --count 24 --write FILE

`--count` questions of each kind, beside the share that is wanted at temperature 0; `--open` stories, dialogues and questions from outside
the world at temperature 0.7, seeds 0 and up, printed as they came; `--speakers` conversations of all kinds at that
temperature, none of which may go on as somebody else. 0 leaves a part out. Exits with 1 if something wanted was missed, at any temperature. `--write` asks nothing
and writes the questions as prompts by category, for `forerun bench speed --prompts FILE`.

Knows: how answers are compared. Stories and conversations have no single right answer; of them it says only whether the
answer ended and stayed with one speaker. In dialogues the user's lines are a script, the answers the model's own.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from forerun import LLM, SamplingParams
from forerun.bench.conversation import run_cases
from forerun.bench.machine import describe_machine, machine_line
from forerun.bench.prompts import PromptCase
from forerun.core import CompletionOutput
from world import make, talk
from world.grammar import GrammarSample

MOST_TOKENS = 400
WARM = 0.7  # temperature of what is printed, and of the search for other speakers
OPEN = ("stories", "talk")  # kinds without one right answer
WANTED = {  # shares of right answers
    "capitals": 0.95, "facts": 0.95, "sums": 0.95, "copying": 0.98, "extraction": 0.92, "from_passage": 0.85,
    "edits": 0.9, "sorting_five": 0.85, "unknown": 0.5, "elementary": 0.9,
}  # fmt: skip
OTHER_SPEAKER = re.compile(r"(^|\n)(user|assistant|system|User|Assistant|Human)\b:?\s*(\n|$)")
SPOKEN = re.compile(r"(^|\n|[.!?] )(user|assistant|system|User|Assistant|Human):")


@dataclass(frozen=True)
class ExamTally:
    """What became of the questions of one kind."""

    kind: str
    right: int
    wrong: list[tuple[str, str, str]]  # question, wanted, given
    num_others: int  # answers that go on as another speaker

    @property
    def share(self) -> float:
        """Of right answers."""
        return self.right / (self.right + len(self.wrong))

    @property
    def missed(self) -> bool:
        """Whether less is right than is wanted."""
        return self.share < WANTED.get(self.kind, 0.0) or self.num_others > 0


def main() -> None:
    """Ask, print, and say by the exit status whether all is as wanted."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--count", type=int, default=200, help="questions of each kind")
    parser.add_argument("--temperature", type=float, default=0.0, help="of their answers; seeds are their numbers")
    parser.add_argument("--open", type=int, default=0, help="print so many stories, dialogues and unknown questions")
    parser.add_argument("--speakers", type=int, default=0, help="conversations searched for other speakers")
    parser.add_argument("--seed", type=int, default=2)
    parser.add_argument("--show", type=int, default=0, help="print so many wrong answers of each kind")
    parser.add_argument("--write", type=Path, help="write --count questions of each kind as prompts, and ask nothing")
    options = parser.parse_args()
    if options.write is not None:
        options.write.write_text("".join(as_prompts(options.count, options.seed)))
        return
    llm = LLM(options.model, drafter="suffix")
    missed = False
    if options.count:
        tallies = examined(llm, options.count, options.seed, options.temperature)
        print(table(tallies, options.show))
        missed = any(tally.missed for tally in tallies)
    if options.open:
        print("\n".join(printed(llm, options.open, options.seed)))
    if options.speakers:
        lines, found = searched(llm, options.speakers, options.seed)
        print("\n".join(lines))
        missed = missed or found
    machine = describe_machine(llm.kernels)
    print(f"\n{options.model}, seed {options.seed}; {machine_line(machine)}, {machine['date']}")
    sys.exit(1 if missed else 0)


def as_prompts(count: int, seed: int) -> Iterator[str]:
    """Lines of a file of prompts in Spec-Bench's layout: so many questions of each kind, the kinds in turns."""
    asked = list(make.exam(random.Random(seed), count))
    for number in range(count):
        for line in asked[number::count]:
            yield json.dumps({"category": line["kind"], "turns": [line["question"]]}) + "\n"


# -- answers with one right text ---------------------------------------------------------------------------------


def examined(
    llm: LLM, count: int, seed: int, temperature: float = 0.0, max_tokens: int = MOST_TOKENS
) -> list[ExamTally]:  # fmt: skip
    """So many questions of each kind, in the order of `make.EXAM`."""
    asked = list(make.exam(random.Random(seed), count))
    conversations = [[{"role": "user", "content": line["question"]}] for line in asked]
    params = [
        SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=number) for number in range(len(asked))
    ]
    outputs = llm.chat(conversations, params)
    right: dict[str, int] = defaultdict(int)
    others: dict[str, int] = defaultdict(int)
    wrong: dict[str, list[tuple[str, str, str]]] = defaultdict(list)
    for line, output in zip(asked, outputs, strict=True):
        answer, kind = output.outputs[0], line["kind"]
        others[kind] += (is_other := goes_on_as_another(llm, answer))
        good = answer.text.strip() == line["answer"].strip()
        if kind in OPEN:
            good = answer.finish_reason == "stop" and not is_other
        right[kind] += good
        if not good:
            wrong[kind].append((line["question"], line["answer"], answer.text))
    return [ExamTally(kind, right[kind], wrong[kind], others[kind]) for kind in make.EXAM]


def goes_on_as_another(llm: LLM, answer: CompletionOutput) -> bool:
    """Whether an answer speaks for somebody else: a role's name before a line, or a token of the chat template."""
    foreign = llm.tokenizer.special_ids - set(llm.tokenizer.eos_token_ids)
    return is_other_speaker(answer.text) or not foreign.isdisjoint(answer.token_ids)


def is_other_speaker(text: str) -> bool:
    """Whether a text has a role's name on a line of its own, or before a colon at the beginning of a sentence."""
    return bool(OTHER_SPEAKER.search(text) or SPOKEN.search(text))


def table(tallies: Sequence[ExamTally], show: int = 0) -> str:
    """Markdown, a row a kind, and behind it the first wrong answers of each."""
    lines = ["| kind | right | wanted | | goes on as another speaker |", "|---|---|---|---|---|"]
    for tally in tallies:
        wanted = f"{WANTED[tally.kind]:.0%}" if tally.kind in WANTED else "ended, one speaker"
        met = "" if tally.kind not in WANTED else "missed" if tally.share < WANTED[tally.kind] else "met"
        lines.append(f"| {tally.kind} | {tally.share:.1%} | {wanted} | {met} | {tally.num_others} |")
    for tally in tallies:
        for question, wanted, given in tally.wrong[:show]:
            lines.append(f"\n{tally.kind}\n    asked  {question!r}\n    wanted {wanted!r}\n    given  {given!r}")
    return "\n".join(lines)


# -- conversations ------------------------------------------------------------------------------------------------


def printed(llm: LLM, count: int, seed: int, max_tokens: int = MOST_TOKENS) -> list[str]:
    """Stories, dialogues and questions from outside the world, each answered with the seed of its number."""
    rng, lines = random.Random(seed), list[str]()
    for title, makes in (
        ("Stories", make.asked_story),
        ("Dialogues", dialogue),
        ("Outside of the world", talk.unknown),
    ):
        samples = list(islice(distinct(rng, makes), count))
        answered = conversed(llm, samples, max_tokens, title == "Stories")
        lines.append(f"\n## {title}: temperature {WARM}, seeds 0 to {count - 1}")
        for number, (sample, answers) in enumerate(zip(samples, answered, strict=True)):
            lines.append(f"\nseed {number}")
            for (said, _), answer in zip(sample.turns, answers, strict=False):  # the last may not fit the context
                cut = "" if answer.finish_reason == "stop" else f"  [{answer.finish_reason}]"
                lines += [f"> {said}", f"{answer.text.strip()}{cut}"]
        if makes is talk.unknown:
            unsure = sum(answers[0].text.strip() == talk.UNKNOWN_ANSWER for answers in answered)
            lines.append(f"\n{unsure} of {count} answered with {talk.UNKNOWN_ANSWER!r}")
    return lines


def searched(llm: LLM, count: int, seed: int, max_tokens: int = MOST_TOKENS) -> tuple[list[str], bool]:
    """So many conversations: how many answers go on as another speaker, and whether any does.

    Every second is a dialogue, where others have spoken before; the others begin with a question of each kind in turns.
    """
    rng, kinds = random.Random(seed + 1), [each for kind in make.EXAM.values() for each in (dialogue, kind)]
    samples = [kinds[number % len(kinds)](rng, "test") for number in range(count)]
    answered = conversed(llm, samples, max_tokens)
    answers = [answer for of_one in answered for answer in of_one]
    wrong = [(number, answer.text) for number, of_one in enumerate(answered) for answer in of_one
             if goes_on_as_another(llm, answer)]  # fmt: skip
    endless = sum(answer.finish_reason != "stop" for answer in answers)
    said = (
        f"{count} conversations at temperature {WARM}, {len(answers)} answers: {len(wrong)} go on as another speaker, "
    )
    return [said + f"{endless} did not end", *(f"    {number}: {text!r}" for number, text in wrong)], bool(wrong)


def dialogue(rng: random.Random, split: str) -> GrammarSample:
    """A conversation of several turns."""
    while True:
        sample = talk.talk(rng, split)
        if len(sample.turns) > 1:
            return sample


def distinct(rng: random.Random, makes: make.Make) -> Iterator[GrammarSample]:
    """Different openings without end."""
    seen: set[str] = set()
    while True:
        sample = makes(rng, "test")
        if sample.turns[0][0] not in seen:
            seen.add(sample.turns[0][0])
            yield sample


def conversed(
    llm: LLM, samples: Sequence[GrammarSample], max_tokens: int, only_first: bool = False
) -> list[list[CompletionOutput]]:
    """The model's answers to the user's lines of each conversation, with its number as the seed."""
    scripts = [sample.turns[:1] if only_first else sample.turns for sample in samples]
    cases = [PromptCase(tuple(said for said, _ in script), True, "world", "") for script in scripts]
    params = [SamplingParams(max_tokens=max_tokens, temperature=WARM, seed=number) for number in range(len(cases))]
    return run_cases(llm, cases, params)


if __name__ == "__main__":
    main()
