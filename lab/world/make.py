"""Writes the small world: what `mini` learns from, and the examination it never sees.

    python lab/world/make.py OUT --samples 400000 --seed 1
    python lab/world/make.py OUT --exam 200 --seed 2

Knows: the shares of the kinds, files. OUT gets `small_world.jsonl.xz` (a record is `{"kind", "turns": [[role, text]]}` or
`{"kind", "text"}`) or `exam.jsonl` (so many a kind). Does not know: tokens, training, models.
"""

from __future__ import annotations

import argparse
import json
import lzma
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from world import drills, elementary, facts, knowledge, skills, talk
from world.grammar import GrammarSample, Wordings, a, expand
from world.stories import Story, story

Make = Callable[[random.Random, str], GrammarSample]
STORY_REQUESTS = Wordings(
    train=("[Tell me|Write] a [short|little|] story about {about}.", "[Can|Could] you [tell|write] a story about {about}?",
           "[Tell me|Write] a story about {hero}.", "A story about {about}, please.", "I [want|would like] to [hear|read] a story "
           "about {about}.", "[Tell me|Write] a [short|] story called \"{title}\".", "[Tell me|Write] a story.",
           "[Please|] write a story for children about {about}.", "Make up a story with {hero} in it.",
           "[A|One more|Another] story[, please|]!", "[I am bored|It is late|I cannot sleep|We have time]. [Tell me|Read me] a story about {about}.",
           "Do you know a story about {about}?", "Think of a story [with|about] {hero}.", "[Story|A bedtime story|A tale]: {about}",
           "{About}: [make|write] a story [of it|about that].", "Once upon a time ... [go on|tell me more], with {hero}, please.",
           "[It is time for a story|Time for a tale|A bedtime story, please][.|!] [This time about|About] {about}.",
           "[Give me|Think up|Say] a [short|nice|new] [tale|story] about {about}[, please|]."),
    test=("Invent a story about {about}.", "Let me hear a story about {about}.", "Story time! {About}."),
)  # fmt: skip
SHARES: tuple[tuple[float, Make], ...] = (
    (0.13, facts.fact), (0.05, facts.sums), (0.01, facts.several), (0.14, skills.skill), (0.08, skills.editing),
    (0.01, skills.changing_case), (0.02, skills.correcting), (0.035, skills.extraction), (0.125, skills.sorting),
    (0.12, drills.drill), (0.11, elementary.elementary), (0.008, elementary.how_to), (0.012, elementary.code),
    (0.03, talk.talk), (0.03, talk.about_self), (0.01, knowledge.advice), (0.008, knowledge.explanation), (0.003, knowledge.joke), (0.003, knowledge.poem),
)  # fmt: skip
BY_HEART = (*facts.FACTS, *elementary.BY_HEART, talk.SELF)  # kinds that may repeat
PLAIN = 0.03  # of the records: stories, facts and sums as running text; what is left are stories that were asked for
EXAM: dict[str, Make] = {
    "capitals": lambda rng, split: facts.ask(facts.capital_fact(rng.choice(facts.countries()), rng), "capitals", rng, split),
    "facts": facts.fact,
    "elementary": elementary.elementary,
    "sums": facts.sums,
    "copying": skills.copying,
    "extraction": skills.extraction,
    "from_passage": skills.from_passage,
    "edits": skills.editing,
    "sorting_five": lambda rng, split: _of_five(rng, split),
    "talk": talk.talk,
    "unknown": talk.unknown,
    "stories": lambda rng, split: asked_story(rng, split),
}  # fmt: skip


def _of_five(rng: random.Random, split: str) -> GrammarSample:
    while True:
        sample = skills.sorting(rng, split)
        if sample.kind == "sorting" and sample.turns[0][1].count(",") == 4:
            return sample


def asked_story(rng: random.Random, split: str) -> GrammarSample:
    """A story that was asked for, sometimes with a question about it."""
    told = story(rng)
    text = expand(rng.choice(STORY_REQUESTS.of(split)), rng, _said(told, rng))
    turns = [(text, told.text)]
    if rng.random() < 0.25:
        turns.append(rng.choice(told.questions))
    return GrammarSample("story", tuple(turns))


def _said(told: Story, rng: random.Random) -> dict[str, str]:
    hero = told.hero or "somebody"
    if hero.startswith("the ") and rng.random() < 0.6:
        hero = a(hero.removeprefix("the "))
    return {"about": told.about, "title": told.title, "hero": hero}


def records(rng: random.Random, count: int) -> Iterator[dict[str, Any]]:
    """Training records of all kinds, no two alike except what is to be known by heart: facts, and who the assistant is."""
    seen: set[int] = set()
    num = 0
    asked = 1.0 - PLAIN - sum(share for share, _ in SHARES)
    makers = [*(make for _, make in SHARES), asked_story]
    shares = [*(share for share, _ in SHARES), asked]
    while num < count:
        if rng.random() < PLAIN:
            record = _plain(rng)
        else:
            sample = rng.choices(makers, shares)[0](rng, "train")
            if rng.random() < 0.03:  # two subjects in one conversation
                sample = GrammarSample(
                    "two_subjects", sample.turns + rng.choices(makers, shares)[0](rng, "train").turns
                )
            record = {"kind": sample.kind, "turns": turns_of(sample)}
        key = hash(json.dumps(record))
        if key not in seen or record["kind"] in BY_HEART:
            seen.add(key)
            num += 1
            yield record


def _plain(rng: random.Random) -> dict[str, Any]:
    drawn = rng.random()
    if drawn < 0.25:
        told = story(rng)
        return {"kind": "story_text", "text": f"{told.title}\n\n{told.text}"}
    if drawn < 0.65:
        return {"kind": "sums_text", "text": " ".join(facts.sum_fact(rng).answer for _ in range(rng.randint(4, 12)))}
    lines = [line for _ in range(rng.randint(1, 4)) for line in facts.sentences(rng)]
    return {"kind": "facts_text", "text": " ".join(lines)}


def turns_of(sample: GrammarSample) -> list[list[str]]:
    """The turns of a sample as [role, text]."""
    return [[role, text] for pair in sample.turns for role, text in zip(("user", "assistant"), pair, strict=True)]


def exam(rng: random.Random, count: int) -> Iterator[dict[str, Any]]:
    """So many different questions of each kind, in wordings that training never has."""
    for kind, make in EXAM.items():
        seen: set[str] = set()
        while len(seen) < count:
            question, answer = make(rng, "test").turns[0]
            if question not in seen:
                seen.add(question)
                yield {"kind": kind, "question": question, "answer": answer}


def main() -> None:
    """Read the command line and write a file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="the folder to write to")
    parser.add_argument("--samples", type=int, default=400_000, help="training records")
    parser.add_argument(
        "--exam", type=int, default=0, help="write an examination with so many questions of each kind instead"
    )
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    rng = random.Random(options.seed)
    if options.exam:
        lines = list(exam(rng, options.exam))
        (options.out / "exam.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
        print(f"{len(lines)} questions")
        return
    kinds: Counter[str] = Counter()
    with lzma.open(options.out / "small_world.jsonl.xz", "wt", encoding="utf-8", preset=1) as file:
        for record in records(rng, options.samples):
            kinds[record["kind"]] += 1
            file.write(json.dumps(record, ensure_ascii=False) + "\n")
    print(", ".join(f"{kind} {count}" for kind, count in kinds.most_common()))


if __name__ == "__main__":
    main()
