"""What a head learns from: rows of token files, files of answers, or prompts that the target answers here.

Knows which sequences are held out and what is kept in the run folder's `data/`. The parts know how files are read
(`rows`, `prompts`) and how answers are written (`answers`).
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from forerun.errors import ConfigError, DataError
from forerun.models.loader import load_tokenizer
from forerun.training.heads.answers import answer_file_rows, engine_writer, write_answers
from forerun.training.heads.config import HeadJob, HeadRecipe
from forerun.training.heads.prompts import read_prompts
from forerun.training.heads.rows import Rows, hold_out, token_file_rows
from forerun.training.heads.target import TrainingTarget
from forerun.training.run_folder import clear
from forerun.weights.corpus import fingerprint as vocabulary_of

Report = Callable[[str], None]
WRITTEN = (".bin", ".answers")  # files that hold what the target wrote


@dataclass(frozen=True)
class Sequences:
    """Sequences to train on, and prompts never trained on with the target's greedy answers."""

    train: Rows
    heldout: Rows


@dataclass(frozen=True)
class Material:
    """The content of data files: rows to train on, or else prompts to be answered, and prompts that are held out."""

    rows: Rows | None
    prompts: list[list[int]]
    heldout: list[list[int]]


def prepare(recipe: HeadRecipe, job: HeadJob, target: TrainingTarget, report: Report) -> Sequences:
    """Sequences to train on, from what is written already or from prompts, and answers to held-out prompts.

    If the job is `fresh`, an earlier run in the folder is deleted once all files are read.
    """
    found = read(recipe, job, target, report)
    if job.fresh:
        clear(job.folder)
    heldout = heldout_answers(recipe, job, found.heldout, report)
    train = found.rows if found.rows is not None else trained_answers(recipe, job, found.prompts, report)
    return Sequences(train, heldout)


def read(recipe: HeadRecipe, job: HeadJob, target: TrainingTarget, report: Report) -> Material:
    """What the files hold; raises ConfigError and DataError."""
    written = [path for path in job.data if path.suffix in WRITTEN]
    if not written:
        return from_prompts(recipe, job, report)
    if len(written) < len(job.data):
        raise DataError(
            f"{len(written)} of {len(job.data)} files are {' or '.join(WRITTEN)} files, the others prompts; give "
            "prompts alone, or answer them first with `forerun train answers`"
        )
    return from_written(recipe, job, target, report)


def from_written(recipe: HeadRecipe, job: HeadJob, target: TrainingTarget, report: Report) -> Material:
    """Rows of token files and packed answers; the prompts held out are those of answers, if there are any."""
    options, row_len, vocab_size = recipe.data, recipe.schedule.seq_len, target.shape.vocab_size
    most = options.max_tokens
    files = [path for path in job.data if path.suffix == ".answers"]
    vocabulary = vocabulary_of(load_tokenizer(job.target)) if files else None
    answers = [answer_file_rows(path, vocab_size, most, vocabulary) for path in files]
    texts = [token_file_rows(path, row_len, vocab_size, most) for path in job.data if path.suffix == ".bin"]
    rows = Rows.join(answers or texts)
    check_lengths(rows, row_len, report)
    train, held = hold_out(len(rows), options.heldout_prompts)
    ends = rows.prompts[held] if answers else [options.prompt_tokens] * len(held)
    prompts = [rows.sequence(int(number))[: int(end)].tolist() for number, end in zip(held, ends, strict=True)]
    used = Rows.join([rows.take(train).packed(row_len), *texts]) if answers else rows.take(train)
    report(f"{len(used)} rows of {used.num_tokens} tokens, {used.num_answered} of them answers")
    return Material(used, [], prompts)


def check_lengths(rows: Rows, row_len: int, report: Report) -> None:
    """Reports how many sequences lose their end; raises DataError if no answer would be left to learn from."""
    longest, num_long = int(rows.lens.max()), int((rows.lens > row_len).sum())
    if int(rows.prompts.min()) >= row_len:
        raise DataError(
            f"every prompt fills schedule.seq_len {row_len}, so no answer would be seen; raise it, at most to {longest}"
        )
    if num_long:
        lost = longest - row_len
        report(
            f"{num_long} of {len(rows)} sequences are cut at schedule.seq_len {row_len}, the longest by {lost} tokens"
        )


def from_prompts(recipe: HeadRecipe, job: HeadJob, report: Report) -> Material:
    """Prompts of files of prompts."""
    options = recipe.data
    if options.prompt_tokens + options.answer_tokens > recipe.schedule.seq_len:
        raise ConfigError(
            f"data.prompt_tokens {options.prompt_tokens} + data.answer_tokens {options.answer_tokens} exceed "
            f"schedule.seq_len {recipe.schedule.seq_len}: no window would hold a whole answer"
        )
    prompts = read_all_prompts(recipe, job, report)
    train, held = hold_out(len(prompts), options.heldout_prompts)
    return Material(None, [prompts[number] for number in train], [prompts[number] for number in held])


def read_all_prompts(recipe: HeadRecipe, job: HeadJob, report: Report) -> list[list[int]]:
    """The prompts of all files, shuffled, as many as `data.max_tokens` allows with their answers."""
    tokenizer, options = load_tokenizer(job.target), recipe.data
    found = read_prompts(job.data, tokenizer, options.prompt_tokens, tokenizer.chat_template is not None)
    report(found.summary())
    random.Random(recipe.seed).shuffle(found.ids)
    used = list(accumulate(len(ids) + options.answer_tokens for ids in found.ids))
    return [
        ids for ids, total in zip(found.ids, used, strict=True) if not options.max_tokens or total <= options.max_tokens
    ]


def trained_answers(recipe: HeadRecipe, job: HeadJob, prompts: list[list[int]], report: Report) -> Rows:
    """The target's answers to learn from, a share of them greedy, the rest at T = 1."""
    options, path = recipe.data, job.folder / "data" / "answers.jsonl"
    share = options.greedy_share
    temperatures = [float(int((i + 1) * share) == int(i * share)) for i in range(len(prompts))]
    about = about_answers(job, options.answer_tokens, prompts) | {"greedy_share": share, "seed": recipe.seed}
    rows = write_answers(
        path,
        prompts,
        temperatures,
        about,
        lambda: engine_writer(job.target, options.answer_tokens, recipe.seed),
        report,
    )
    report(
        f"{len(rows)} sequences of {rows.num_tokens} tokens; {len(prompts) - len(rows)} answers too short to learn from"
    )
    return rows


def heldout_answers(recipe: HeadRecipe, job: HeadJob, prompts: list[list[int]], report: Report) -> Rows:
    """The target's greedy answers to held-out prompts, written once."""
    num_tokens, path = recipe.data.heldout_tokens, job.folder / "data" / "heldout.jsonl"
    about = about_answers(job, num_tokens, prompts)
    rows = write_answers(
        path, prompts, [0.0] * len(prompts), about, lambda: engine_writer(job.target, num_tokens, recipe.seed), report
    )
    if not len(rows):
        raise DataError(f"the target answers none of {len(prompts)} held-out prompts; give prompts it can answer")
    return rows


def about_answers(job: HeadJob, num_tokens: int, prompts: list[list[int]]) -> dict[str, Any]:
    """What answers depend on."""
    return {"target": job.target, "tokens": num_tokens, "prompts": fingerprint(Rows.of(prompts, [0] * len(prompts)))}


def fingerprint(rows: Rows) -> int:
    """A checksum of all tokens and of where sequences and answers begin."""
    sums = 0
    for number in range(len(rows)):
        sums = zlib.crc32(rows.sequence(number).tobytes(), sums ^ int(rows.prompts[number]))
    return sums
