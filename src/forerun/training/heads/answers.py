"""The target's own answers, written through the engine.

Knows batches of prompts and where answers are kept, so that an interrupted run can be resumed. Knows nothing of heads.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from forerun import LLM, SamplingParams
from forerun.errors import DataError, TrainingError
from forerun.progress import TimeLeft
from forerun.training.heads.rows import Rows

Report = Callable[[str], None]
Writer = Callable[[Sequence[Sequence[int]], Sequence[float], Sequence[int]], list[list[int]]]
BATCH = 64  # prompts answered between two saves
SEEDS_APART = 1_000_003  # so that runs with different seeds share no request seeds


def engine_writer(model: str, num_tokens: int, seed: int) -> Writer:
    """Makes a function that answers prompts in at most `num_tokens` tokens, each by its temperature and number."""
    llm = LLM(model)

    def write(
        prompts: Sequence[Sequence[int]], temperatures: Sequence[float], numbers: Sequence[int]
    ) -> list[list[int]]:
        params = [
            SamplingParams(temperature=temperature, max_tokens=num_tokens, seed=seed * SEEDS_APART + number)
            for temperature, number in zip(temperatures, numbers, strict=True)
        ]
        outputs = llm.generate([list(prompt) for prompt in prompts], params)
        return [list(output.outputs[0].token_ids) for output in outputs]

    return write


def write_answers(
    path: Path, prompts: Sequence[Sequence[int]], temperatures: Sequence[float], about: dict[str, Any],
    make_writer: Callable[[], Writer], report: Report,
) -> Rows:  # fmt: skip
    """Answers all prompts, continuing what an earlier call left in the file `path` -> prompts and answers as rows.

    about: what the answers depend on; another value in the file is refused with TrainingError.
    """
    lines = read_lines(path, about)
    if len(lines) < len(prompts):
        write, left = make_writer(), TimeLeft(len(prompts), len(lines))
        with path.open("a", encoding="utf-8") as out:
            for first in range(len(lines), len(prompts), BATCH):
                chosen = prompts[first : first + BATCH]
                numbers = range(first, first + len(chosen))
                answers = write(chosen, temperatures[first : first + BATCH], numbers)
                new = [{"prompt": list(p), "answer": a} for p, a in zip(chosen, answers, strict=True)]
                out.writelines(json.dumps(line) + "\n" for line in new)
                out.flush()
                lines += new
                report(f"prompts answered by the target: {left(len(lines))}")
    return rows_of_lines(lines)


def rows_of_lines(lines: Sequence[dict[str, Any]]) -> Rows:
    """Prompts with their answers as rows; answers too short to learn from are left out."""
    lines = [line for line in lines if len(line["answer"]) > 1]
    return Rows.of([line["prompt"] + line["answer"] for line in lines], [len(line["prompt"]) for line in lines])


def first_rows(rows: Rows, max_tokens: int) -> Rows:
    """As many of the first sequences as have `max_tokens` together."""
    return rows.take(np.flatnonzero(np.cumsum(rows.lens) <= max_tokens))


def answer_file_rows(path: Path, vocab_size: int, max_tokens: int = 0, vocabulary: str | None = None) -> Rows:
    """The rows of a file that `write_answers` has written, with any options.

    max_tokens: take the first prompts with answers up to so many tokens; 0 takes the whole file. vocabulary: the
    tokenizer's `weights.corpus.fingerprint`, None: not compared. Raises DataError for a file that is something else, is
    empty, holds more in its first answer, has the tokens of another tokenizer or ids outside the vocabulary.
    """
    try:
        about, *lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        rows = first_rows(rows_of_lines(lines), max_tokens) if max_tokens else rows_of_lines(lines)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} is no file of answers: {error}; write one with `forerun train answers`") from error
    check_vocabulary(path, about, vocabulary)
    if not len(rows):
        more = f" within --data-tokens {max_tokens}; raise that, or" if max_tokens else ";"
        raise DataError(f"{path} holds no answer{more} write it anew with `forerun train answers`")
    highest = int(rows.tokens.max())
    if highest >= vocab_size:
        raise DataError(f"{path} holds token id {highest}, the target knows 0 to {vocab_size - 1}: was it made for it?")
    return rows


def check_vocabulary(path: Path, about: Any, vocabulary: str | None) -> None:
    """Raise DataError where the first line of an answers file tells of another tokenizer; older files do not tell."""
    told = about.get("vocabulary") if isinstance(about, dict) else None
    if vocabulary is not None and told not in (None, vocabulary):
        raise DataError(
            f"{path} has answers of {about.get('target')}, in tokens of another tokenizer than the target's: let this "
            "target answer the prompts, by `forerun train answers --target`"
        )


def read_lines(path: Path, about: dict[str, Any]) -> list[dict[str, Any]]:
    """The complete lines of an answers file, which is created if it is missing.

    Raises TrainingError for a file that is something else or depends on something else.
    """
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(about) + "\n", encoding="utf-8")
        return []
    text = path.read_text(encoding="utf-8")
    complete = text[: text.rfind("\n") + 1]
    try:
        header, *lines = [json.loads(line) for line in complete.splitlines()] or [None]
    except ValueError as error:
        raise TrainingError(f"{path} is no file of answers: {error}; delete it, or use another --out") from error
    if complete != text:  # a line was cut off by a crash
        path.write_text(complete, encoding="utf-8")
    if isinstance(header, dict) and "vocabulary" not in header:  # files of before do not tell it
        about = {name: value for name, value in about.items() if name != "vocabulary"}
    if header != about:
        raise TrainingError(f"{path} was written for {header}, now it is {about}; use another --out, or --fresh")
    return lines
