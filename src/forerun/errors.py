"""The exception tree: every error a user of forerun can meet.

ForerunError
├── ConfigError            an option is unknown, out of range, or contradicts another
│   ├── SamplingError      the same for one request's sampling parameters
│   └── UnknownAdapterError no LoRA adapter has the name
├── ModelError             a model cannot be loaded or used
│   ├── ModelNotFoundError no such folder, embedded model or hub id
│   ├── CheckpointError    a file is missing, truncated, corrupt, or of the wrong shape
│   ├── UnsupportedError   the checkpoint asks for something forerun does not implement
│   └── VocabularyError    tokenizer, target and draft do not share one vocabulary
├── RequestError           one request cannot be served; others go on
│   ├── PromptError        empty, too long, or with token ids outside the vocabulary
│   ├── QueueFullError     more requests are waiting than the engine was told to accept
│   ├── DeadlineError      the request was not finished in the time it had
│   └── LogitsError        the model produced NaN or infinity, or no token is allowed
│       └── GrammarError   a grammar fails, or cannot say in time which tokens are allowed
├── ResourceError          the machine has too little memory or room, no such device, or starts no more threads
├── DrafterError           a drafter proposed what cannot be verified; its requests go on without it
├── KernelError            a kernel backend was asked for that is not available here
├── RankLost               another process of the model died or does not answer
└── TrainingError          a training run cannot start or go on
    └── DataError          a data or prompt file is missing or malformed

Knows: names and what they mean. Does not know: anything else of forerun.
Every message says what was found, what is allowed, and what to do.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class ForerunError(Exception):
    """Base of every error forerun raises for its users."""


class ConfigError(ForerunError):
    """An option is unknown, out of range, or contradicts another."""


class UnknownAdapterError(ConfigError):
    """No adapter of this name is loaded."""


class SamplingError(ConfigError):
    """A sampling parameter of one request is out of range or contradicts another."""


class ModelError(ForerunError):
    """A model cannot be loaded or used."""


class ModelNotFoundError(ModelError):
    """There is no such folder, embedded model or hub id."""


class CheckpointError(ModelError):
    """A checkpoint file is missing, truncated, corrupt, or has a tensor of the wrong shape."""


class UnsupportedError(ModelError):
    """The checkpoint asks for something forerun does not implement."""


class VocabularyError(ModelError):
    """Tokenizer, target and draft do not share one vocabulary."""


class RequestError(ForerunError):
    """One request cannot be served; the others of its batch go on."""


class PromptError(RequestError):
    """The prompt is empty, too long, or holds token ids outside the vocabulary."""


class QueueFullError(RequestError):
    """More requests are waiting than the engine was told to accept; a later try may succeed."""


class DeadlineError(RequestError):
    """The request was not finished in the time it had."""


class LogitsError(RequestError):
    """The model produced NaN or infinity, or the parameters allow no token at all."""


class GrammarError(LogitsError):
    """A grammar fails, or cannot say in time which tokens are allowed."""


class ResourceError(ForerunError):
    """The machine has too little memory or room for what was asked, lacks the device, or starts no more threads."""


class DrafterError(ForerunError):
    """A drafter proposed what cannot be verified; its requests go on without it."""


class KernelError(ForerunError):
    """A kernel backend was asked for that is not available on this machine."""


class RankLost(ForerunError):
    """Another of the processes that compute a model together died, ended, or does not answer in time."""


class TrainingError(ForerunError):
    """A training run cannot start or cannot go on."""


class DataError(TrainingError):
    """A data or prompt file is missing or malformed."""


def suggestion(given: str, known: Iterable[str]) -> str:
    """The end of a message for a name that does not exist: "; did you mean ...?", or "" where nothing is like it."""
    names = {name.lower(): name for name in known}
    close = [names[match] for match in get_close_matches(given.lower(), names, n=3, cutoff=0.7)]
    return f"; did you mean {' or '.join(close)}?" if close else ""
