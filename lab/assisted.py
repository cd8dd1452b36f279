"""Drafts of a model with another tokenizer, beside transformers' assisted generation with two tokenizers.

    python lab/assisted.py mini runs/mini-foreign/export [--prompts question.jsonl] [--limit 24] [--max-tokens 64]
        [--drafts 5] [--their-drafts 5] [--window 10] [--plain]

Same target, same assistant, same token ids as prompts, temperature 0, chains, everything in float32. Prints of both
the tokens a pass of the target and the drafted tokens it verified, in the target's tokens; then every text that
differs, with how far apart transformers finds the two tokens: a tie of floats is under TIE. Nothing is timed. Exit
status 1: a text differs where there is no tie.

transformers counts a step's budget in the assistant's tokens (`--their-drafts`), forerun in the target's (`--drafts`).
With tokens of unequal length the same number is not the same budget: compare what was verified a pass.

Knows: both ways to generate, and what of them is counted. Does not know: how forerun drafts (`drafters.translated`).
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from forerun import LLM, SamplingParams
from forerun.bench.conversation import fitting_cases
from forerun.bench.equality import first_difference
from forerun.bench.machine import describe_machine, machine_line
from forerun.bench.prompts import read_prompts
from forerun.weights.resolve import resolve_model

TIE = 1e-3  # logits of two tokens this near may be ordered either way by two float32 engines
EXIT_DIFFERENT = 1


@dataclass
class Answer:
    """What one prompt was answered, the end of the text included."""

    token_ids: tuple[int, ...]
    num_passes: int  # of the target
    num_drafted: int  # tokens of the target's that these verified


class Theirs:
    """transformers' assisted generation with two tokenizers, `num_drafts` of the assistant's tokens a pass."""

    def __init__(self, target: Path, assistant: Path, num_drafts: int, window: int) -> None:
        self.target, self._assistant = _model(target), _model(assistant)
        self._tokenizers = [transformers.AutoTokenizer.from_pretrained(folder) for folder in (target, assistant)]
        config = self._assistant.generation_config
        config.num_assistant_tokens, config.num_assistant_tokens_schedule = num_drafts, "constant"
        config.assistant_confidence_threshold = 0.0
        config.target_lookbehind = config.assistant_lookbehind = window
        self._rows: list[int] = []  # of each pass of the target
        self.target.register_forward_pre_hook(self._note, with_kwargs=True)

    def _note(self, module: Any, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        self._rows.append(named["input_ids"].shape[1])

    @torch.no_grad()
    def answer(self, prompt: Sequence[int], max_tokens: int) -> Answer:
        """Generate greedily."""
        self._rows.clear()
        ids = torch.tensor([list(prompt)])
        own, other = self._tokenizers
        made = self.target.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=max_tokens,
            assistant_model=self._assistant, tokenizer=own, assistant_tokenizer=other,
        )  # fmt: skip
        num_passes = len(self._rows)
        num_drafted = sum(self._rows) - len(prompt) - (num_passes - 1)  # each later pass computes one known token
        return Answer(tuple(made[0, len(prompt) :].tolist()), num_passes, num_drafted)

    @torch.no_grad()
    def gap(self, known: Sequence[int], one: int, other: int) -> float:
        """How far apart the target's logits of two tokens are behind the known ones."""
        logits = self.target(input_ids=torch.tensor([list(known)])).logits[0, -1]
        return float((logits[one] - logits[other]).abs())


def _model(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def ours(llm: LLM, prompt: Sequence[int], max_tokens: int) -> Answer:
    """Generate greedily with forerun."""
    [output] = llm.generate([list(prompt)], SamplingParams(temperature=0.0, max_tokens=max_tokens))
    [made] = output.outputs
    if made.error is not None:
        raise made.error
    return Answer(tuple(made.token_ids), made.stats.num_steps, made.stats.trees.drafted)


def row(name: str, answers: Sequence[Answer]) -> str:
    """A line of the table."""
    tokens = sum(len(answer.token_ids) for answer in answers)
    passes = sum(answer.num_passes for answer in answers)
    drafted = sum(answer.num_drafted for answer in answers)
    return f"| {name} | {tokens} | {passes} | {tokens / passes:.3f} | {drafted / passes:.2f} |"


def differences(theirs: Theirs, prompts: Sequence[Sequence[int]], pairs: Sequence[tuple[Answer, Answer]]) -> list[str]:
    """Print every text that is not the same in both -> those of them that no tie explains."""
    unexplained = []
    for number, (prompt, (own, other)) in enumerate(zip(prompts, pairs, strict=True), 1):
        place = first_difference(own.token_ids, other.token_ids)
        if place is None:
            continue
        if place >= min(len(own.token_ids), len(other.token_ids)):
            line, is_tie = f"prompt {number}: one ends after {place} tokens, the other goes on", False
        else:
            known = [*prompt, *own.token_ids[:place]]
            gap = theirs.gap(known, own.token_ids[place], other.token_ids[place])
            line, is_tie = f"prompt {number}: token {place}, logits {gap:.2e} apart", gap < TIE
        print(line + (", a tie" if is_tie else ""))
        if not is_tie:
            unexplained.append(line)
    return unexplained


def main() -> int:
    """Measure both, print -> the exit status."""
    given = options()
    shared: dict[str, Any] = {"max_num_seqs": 1, "prefix_caching": False, "keep_learned": False, "dtype": "float32"}
    llm = LLM(
        given.target, drafter="draft", draft_model=given.assistant, tree_width=1, max_draft_tokens=given.drafts,
        adaptive=False, **shared,
    )  # fmt: skip
    num_drafts = given.their_drafts or given.drafts
    theirs = Theirs(resolve_model(given.target), resolve_model(given.assistant), num_drafts, given.window)
    cases = fitting_cases(llm, read_prompts(given.prompts, given.limit))
    prompts = [
        llm.tokenizer.encode_chat([{"role": "user", "content": case.turns[0]}])
        if case.is_chat and llm.tokenizer.chat_template is not None and not given.plain
        else llm.tokenizer.encode(case.turns[0])
        for case in cases
    ]
    prompts = [prompt for prompt in prompts if len(prompt) + given.max_tokens <= llm.max_model_len]
    pairs = [
        (ours(llm, prompt, given.max_tokens), theirs.answer(prompt, given.max_tokens)) for prompt in prompts
    ]  # fmt: skip
    print("| | tokens | passes of the target | tokens a pass | drafts verified a pass |\n|---|---|---|---|---|")
    print(row("forerun", [own for own, _ in pairs]))
    print(row(f"transformers {transformers.__version__}", [other for _, other in pairs]))
    unexplained = differences(theirs, prompts, pairs)
    facts = describe_machine(llm.kernels)
    print(f"{len(prompts)} prompts, {machine_line(facts)}, {facts['date']}")
    print(shlex.join(["python", "lab/assisted.py", *sys.argv[1:]]))
    return EXIT_DIFFERENT if unexplained else 0


def options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Two tokenizers: forerun beside transformers' assisted generation.")
    parser.add_argument("target", help="a folder or an embedded name")
    parser.add_argument("assistant", help="a draft model with another tokenizer")
    parser.add_argument("--prompts", type=Path, help="a prompt file; forerun's own unless given")
    parser.add_argument("--limit", type=int, default=24)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--drafts", type=int, default=5, help="tokens of the target's a step, in forerun")
    parser.add_argument("--their-drafts", type=int, help="of the assistant's, in transformers; --drafts unless given")
    parser.add_argument("--window", type=int, default=10, help="tokens that transformers tokenizes again each step")
    parser.add_argument("--plain", action="store_true", help="questions as texts to go on with, not as chats")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
