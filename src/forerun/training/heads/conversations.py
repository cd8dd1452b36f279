"""`forerun train answers`: the target answers files of prompts once, turn after turn, for any number of trainings.

Knows that a user's second message follows the target's own answer to the first, and the files it writes:
`FOLDER/turn1.answers`, `FOLDER/turn2.answers` and so on. Does not know: how answers are written (`answers`), what
learns from them.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from forerun.errors import ConfigError, DataError
from forerun.models.loader import load_tokenizer
from forerun.server.thoughts import said
from forerun.training.heads.answers import Report, Writer, engine_writer, read_lines, write_answers
from forerun.training.heads.prompts import read_file
from forerun.training.heads.rows import Rows
from forerun.training.heads.sequences import fingerprint
from forerun.training.recipe import check_at_least_one
from forerun.weights.corpus import fingerprint as vocabulary_of

ENDING = ".answers"


@dataclass(frozen=True)
class AnswerOptions:
    """How prompts are answered: number i at temperatures[i % len(temperatures)], in at most `answer_tokens`."""

    prompt_tokens: int = 864  # longer prompts lose their beginning
    answer_tokens: int = 160
    temperatures: tuple[float, ...] = (0.0, 1.0, 0.0, 0.7)
    max_turns: int = 2
    seed: int = 1

    def __post_init__(self) -> None:
        check_at_least_one(self, "prompt_tokens", "answer_tokens", "max_turns")
        if not self.temperatures or min(self.temperatures) < 0:
            raise ConfigError(f"temperatures {list(self.temperatures)}: give at least one, none below 0")


def read_temperatures(listed: str) -> tuple[float, ...]:
    """Reads temperatures separated by commas; raises ConfigError."""
    try:
        return tuple(float(part) for part in listed.split(","))
    except ValueError as error:
        raise ConfigError(f"--temperatures {listed!r}: give numbers separated by commas, such as 0,1") from error


@dataclass(frozen=True)
class TrainingTalk:
    """A conversation in progress: its messages so far, the user's remaining messages, its temperature."""

    messages: tuple[dict[str, str], ...]
    to_say: tuple[str, ...]
    temperature: float


def answer_files(model: str, files: Sequence[Path], folder: Path, options: AnswerOptions, report: Report) -> list[Path]:
    """Answers all conversations of some prompt files, continuing what `folder` holds -> the files of answers.

    Raises DataError for files without a prompt and ConfigError for a model without a chat template.
    """
    tokenizer = load_tokenizer(model)
    if tokenizer.chat_template is None:
        raise ConfigError(f"{model} has no chat template, so it answers no turns; give its head prompts with --data")
    talks = read_talks(files, options)
    random.Random(options.seed).shuffle(talks)
    writers: list[Writer] = []  # the model is loaded once, and only if there is something to write

    def writer() -> Writer:
        writers[:] = writers or [engine_writer(model, options.answer_tokens, options.seed)]
        return writers[0]

    paths: list[Path] = []
    while talks and len(paths) < options.max_turns:
        paths.append(folder / f"turn{len(paths) + 1}{ENDING}")
        prompts = [tokenizer.encode_chat(spoken(talk))[-options.prompt_tokens :] for talk in talks]
        about = {"target": model, **asdict(options), "prompts": fingerprint(Rows.of(prompts, [0] * len(prompts)))}
        about = {**about, "temperatures": list(options.temperatures), "vocabulary": vocabulary_of(tokenizer)}
        write_answers(paths[-1], prompts, [talk.temperature for talk in talks], about, writer, report)
        answers = [line["answer"] for line in read_lines(paths[-1], about)]
        rows = zip(talks, prompts, answers, strict=True)
        after = [heard(talk, said(tokenizer, prompt, answer)) for talk, prompt, answer in rows if talk.to_say[1:]]
        talks = [talk for talk in after if talk.messages[-1]["content"]]  # a thought that was cut off is no answer
    return paths


def read_talks(files: Sequence[Path], options: AnswerOptions) -> list[TrainingTalk]:
    """The conversations of prompt files, not yet begun; records without text are left out."""
    temperatures = options.temperatures
    said = [tuple(turn for turn in turns if turn.strip()) for path in files for turns, _ in read_file(path)]
    talks = [TrainingTalk((), turns, temperatures[i % len(temperatures)]) for i, turns in enumerate(filter(None, said))]
    if not talks:
        raise DataError(f"no prompt in {', '.join(map(str, files))}: {len(said)} records, all of them empty")
    return talks


def spoken(talk: TrainingTalk) -> list[dict[str, str]]:
    """The messages of a conversation with the user's next message."""
    return [*talk.messages, {"role": "user", "content": talk.to_say[0]}]


def heard(talk: TrainingTalk, answer: str) -> TrainingTalk:
    """The conversation after an answer."""
    message = {"role": "assistant", "content": answer}
    return TrainingTalk((*spoken(talk), message), talk.to_say[1:], talk.temperature)
