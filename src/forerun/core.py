"""The nouns of the engine: sampling parameters, requests, plans, outputs.

Knows: plain values and how they are validated. Does not know: tensors, models, drafters. Standard library only.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, Final, Literal, NamedTuple, Protocol

from forerun.errors import SamplingError

FinishReason = Literal["stop", "length", "abort", "error"]
MAX_LOGPROBS = 100
MAX_SEED = 2**64 - 1
MIN_TEMPERATURE = 1e-30  # below it logits divided by it leave the range of float32
LEAST_JUDGED: Final = 16  # tokens from which a speed-up is told: answers of 3 had 0.28x to 2.25x


@dataclass(frozen=True, slots=True)
class TokenBits:
    """A set of token ids as bits: id t is in it if bit t % 8 of byte t // 8 is set."""

    packed: bytes


class GrammarMask(Protocol):
    """A hook that says which tokens may follow: the state after a prefix is a pure function of that prefix."""

    def allowed(self, output_token_ids: Sequence[int]) -> Sequence[int] | TokenBits | None:
        """Token ids allowed after `output_token_ids`, listed or as bits (None: all)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the tokens of one request are chosen and when it ends. Names and meanings follow vLLM where it has them.

    Raises SamplingError for values out of range or in contradiction.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0 or -1: off
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = ()
    grammar: GrammarMask | None = None
    seed: int | None = None  # None: one is drawn and reported
    max_tokens: int | None = 16  # None: up to the model's context
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None  # how many alternatives beside the chosen token
    prompt_logprobs: int | None = None
    allowed: array[int] = field(init=False, repr=False, compare=False)  # allowed_token_ids, ready for every step
    biases: tuple[array[int], array[float]] = field(init=False, repr=False, compare=False)  # likewise logit_bias

    def __post_init__(self) -> None:
        for name, kind in (("stop", str), ("bad_words", str), ("stop_token_ids", int), ("allowed_token_ids", int)):
            if name != "allowed_token_ids" or self.allowed_token_ids is not None:
                object.__setattr__(self, name, _as_tuple(name, getattr(self, name), kind))
        object.__setattr__(self, "logit_bias", {} if self.logit_bias is None else self.logit_bias)
        _check_ranges(self)
        _check_contradictions(self)
        object.__setattr__(self, "allowed", array("q", self.allowed_token_ids or ()))
        object.__setattr__(self, "biases", (array("q", self.logit_bias), array("f", self.logit_bias.values())))

    @property
    def greedy(self) -> bool:
        """Temperature 0: the most probable token, no randomness."""
        return self.temperature == 0.0

    def with_seed(self, seed: int) -> SamplingParams:
        """The same parameters with the seed fixed; behind the largest seed comes 0."""
        return replace(self, seed=seed - MAX_SEED - 1 if seed > MAX_SEED else seed)


def _as_tuple(name: str, value: Any, kind: type) -> tuple[Any, ...]:
    listed = (value,) if isinstance(value, str) else () if value is None else value
    if not isinstance(listed, Sequence | Set) or any(not isinstance(v, kind) or isinstance(v, bool) for v in listed):
        raise SamplingError(f"{name} must be a list of {'texts' if kind is str else 'token ids'}, got {value!r:.80}")
    return tuple(dict.fromkeys(listed))  # each once


def _check_ranges(params: SamplingParams) -> None:
    """Refuse each value outside its own range."""
    _number("temperature", params.temperature, 0.0, 100.0)
    if 0 < params.temperature < MIN_TEMPERATURE:
        raise SamplingError(f"temperature must be 0 or at least {MIN_TEMPERATURE:g}, got {params.temperature!r}: use 0")
    _number("top_p", params.top_p, 0.0, 1.0, low_open=True)
    _number("min_p", params.min_p, 0.0, 1.0)
    _number("repetition_penalty", params.repetition_penalty, 0.01, 100.0)  # beyond it logits leave float32
    _number("presence_penalty", params.presence_penalty, -2.0, 2.0)
    _number("frequency_penalty", params.frequency_penalty, -2.0, 2.0)
    _whole("n", params.n, 1, 256)
    _whole("top_k", params.top_k, -1, 2**31)
    _whole("min_tokens", params.min_tokens, 0, 2**31)
    highest = {"max_tokens": 2**31, "logprobs": MAX_LOGPROBS, "prompt_logprobs": MAX_LOGPROBS, "seed": MAX_SEED}
    for name, high in highest.items():
        if getattr(params, name) is not None:
            _whole(name, getattr(params, name), 1 if name == "max_tokens" else 0, high)
    for token_id in (min(params.allowed_token_ids), max(params.allowed_token_ids)) if params.allowed_token_ids else ():
        _whole("allowed_token_ids", token_id, 0, 2**31)
    if not isinstance(params.logit_bias, Mapping):
        raise SamplingError(f"logit_bias must be biases by token id, got {params.logit_bias!r:.80}")
    for token_id, bias in params.logit_bias.items():
        _whole("logit_bias key", token_id, 0, 2**31)
        _number(f"logit_bias[{token_id}]", bias, -100.0, 100.0)


def _number(name: str, value: Any, low: float, high: float, low_open: bool = False) -> None:
    valid = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not valid or not (low < value <= high if low_open else low <= value <= high):
        raise SamplingError(f"{name} must be a number in {'[('[low_open]}{low:g}, {high:g}], got {value!r}")


def _whole(name: str, value: Any, low: int, high: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise SamplingError(f"{name} must be a whole number from {low} to {high}, got {value!r}")


def _check_contradictions(params: SamplingParams) -> None:
    """Refuse values that are fine alone but not together."""
    if params.max_tokens is not None and params.min_tokens > params.max_tokens:
        raise SamplingError(f"min_tokens {params.min_tokens} is above max_tokens {params.max_tokens}: change either")
    if params.allowed_token_ids is not None and not params.allowed_token_ids:
        raise SamplingError("allowed_token_ids is empty, so no token could be chosen: name at least one, or leave it")
    if any(not text for text in (*params.stop, *params.bad_words)):
        raise SamplingError("stop and bad_words may not hold an empty string")


class Status(Enum):
    """Where a request stands."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Request:
    """One sequence being generated. Of `n` samples each is a request of its own.

    `token_ids` are all known tokens, prompt first. The last of them is the *root*: its KV is never computed before the
    step that chooses what follows it. `num_computed` counts tokens whose KV is in the cache. Times are on the clock of
    `time.perf_counter`; `turn` is the scheduler's: who has the lower one comes first.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    seed: int
    sample_index: int = 0
    parent_id: str = ""
    bad_word_ids: tuple[tuple[int, ...], ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    max_len: int = 0  # known tokens at which the request ends with "length"
    prediction: tuple[int, ...] = ()  # what the answer is expected to repeat in part; drafters may copy from it
    adapter: object | None = None  # a loaded LoRA adapter, the model's to know; by identity: names may be given again
    cache_salt: str = ""  # requests of another one share neither cached prefixes nor what drafters learned
    speculate: bool = True
    drafter: str | None = None  # of a portfolio's members the only one that may draft
    max_nodes: int | None = None  # of its trees, the root included; None: the policy alone decides
    priority: int = 0  # lower comes first; the longer a request waits, the less this counts
    arrival_s: float | None = None  # None: when it is added to the engine
    deadline_s: float | None = None  # when it ends with "abort", finished or not
    turn: tuple[float, int] = (0.0, 0)
    status: Status = Status.WAITING
    token_ids: list[int] = field(default_factory=list)
    num_computed: int = 0
    block_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: Exception | None = None
    num_preemptions: int = 0
    num_cached_tokens: int = 0  # of the prompt, found in the prefix cache when the request was first admitted
    failed_drafters: tuple[str, ...] = ()  # raised, or proposed nonsense; they are not asked for it again
    last_asked: dict[str, tuple[int, int]] = field(default_factory=dict)  # by drafter: tokens known, and preemptions
    right_drafts: dict[str, tuple[float, float]] = field(default_factory=dict)  # expected and found, both fading

    def __post_init__(self) -> None:
        self.token_ids = list(self.prompt_token_ids)

    @property
    def output_token_ids(self) -> list[int]:
        """Tokens generated so far."""
        return self.token_ids[len(self.prompt_token_ids) :]

    @property
    def num_output(self) -> int:
        """How many tokens were generated so far."""
        return len(self.token_ids) - len(self.prompt_token_ids)

    @property
    def prompt_logprobs(self) -> int | None:
        """Alternatives wanted at every token of the prompt, None for no entries; the first of `n` samples has all."""
        return self.params.prompt_logprobs if self.sample_index == 0 else None

    @property
    def root_position(self) -> int:
        """Position of the last known token."""
        return len(self.token_ids) - 1

    @property
    def num_remaining(self) -> int:
        """Tokens that may still be generated before "length"."""
        return self.max_len - len(self.token_ids)


@dataclass(slots=True)
class ScheduledRequest:
    """What one request does in one step: a span of known tokens, then (if it has a root) a tree.

    The scheduler alone changes it, while it plans the step.
    """

    request: Request
    num_span: int  # known tokens to compute before the root
    max_nodes: int  # tree nodes, the root included; 0: the span stops short of the root

    @property
    def reaches_root(self) -> bool:
        """The step chooses this request's next token."""
        return self.max_nodes > 0


class Resumed(NamedTuple):
    """A request that starts on blocks the prefix cache had; see `Drafter.resume`.

    `copy_from` is a block whose first `num_copied` rows are to be copied into the request's block of number
    `copy_to`, before anything else happens in the step.
    """

    request: Request
    num_ready: tuple[int, ...]  # leading positions with valid drafter KV, a kind each
    copy_from: int | None = None
    copy_to: int = 0
    num_copied: int = 0


class Plan(NamedTuple):
    """One step's work."""

    scheduled: tuple[ScheduledRequest, ...]
    preempted: tuple[Request, ...] = ()
    resumed: tuple[Resumed, ...] = ()


class TokenLogprob(NamedTuple):
    """The log-probability of one token under the model (before temperature and filters), and its rank from 1."""

    logprob: float
    rank: int
    token_id: int


@dataclass(frozen=True, slots=True)
class PositionLogprobs:
    """Log-probabilities at one position: the chosen token and the most probable ones, best first."""

    chosen: TokenLogprob
    top: tuple[TokenLogprob, ...]


@dataclass(slots=True)
class DepthCount:
    """How the nodes of one depth fared."""

    tried: int = 0  # steps in which a node of this depth was verified
    drafted: int = 0
    accepted: int = 0


@dataclass(slots=True)
class DrafterCount:
    """How one drafter fared: nodes that were verified, and those of them that were accepted."""

    drafted: int = 0
    accepted: int = 0
    depths: list[DepthCount] = field(default_factory=list)  # the first for children of the root

    @property
    def wasted(self) -> int:
        """Nodes that were verified and not accepted."""
        return self.drafted - self.accepted

    def count(self, drafted: Sequence[int], accepted: Sequence[int]) -> None:
        """A step verified nodes of these depths (from 1 on) and accepted those."""
        self.drafted += len(drafted)
        self.accepted += len(accepted)
        self._reach(max(drafted, default=0))
        for depth in drafted:
            self.depths[depth - 1].drafted += 1
        for depth in set(drafted):
            self.depths[depth - 1].tried += 1
        for depth in accepted:
            self.depths[depth - 1].accepted += 1

    def add(self, other: DrafterCount) -> DrafterCount:
        """Add another count to this one, which is returned."""
        self.drafted += other.drafted
        self.accepted += other.accepted
        self._reach(len(other.depths))
        for mine, theirs in zip(self.depths, other.depths, strict=False):
            mine.tried += theirs.tried
            mine.drafted += theirs.drafted
            mine.accepted += theirs.accepted
        return self

    def _reach(self, depth: int) -> None:
        self.depths += [DepthCount() for _ in range(depth - len(self.depths))]


def speedup(plain_s: float, drafted_s: float) -> float | None:
    """Seconds plain decoding takes for some tokens over those that drafting took for them; None without either."""
    return plain_s / drafted_s if plain_s > 0.0 and drafted_s > 0.0 else None


@dataclass(slots=True)
class RequestStats:
    """What a request cost and what speculation did for it."""

    num_prompt_tokens: int = 0
    num_tokens: int = 0  # generated
    num_elsewhere: int = 0  # of these, by another engine, where this one went on
    num_first: int = 0  # of these, in this engine's first step, which reads the end of the prompt
    num_steps: int = 0  # target passes that chose tokens
    num_preemptions: int = 0
    num_cached_tokens: int = 0  # of the prompt, not computed again
    queue_s: float = 0.0
    ttft_s: float = 0.0
    decode_s: float = 0.0  # from the first to the last token
    drafters: dict[str, DrafterCount] = field(default_factory=dict)
    trees: DrafterCount = field(default_factory=DrafterCount)  # whoever drafted
    num_plain_steps: int = 0  # of num_steps, without drafts
    draft_s: float = 0.0  # its share of the steps' drafting: seconds over requests drafted for
    verify_s: float = 0.0  # its share of the passes, and of choosing tokens, in steps that read no prompt
    step_s: float = 0.0  # of those steps, whole
    plain_s: float | None = None  # what plain decoding would have taken for the tokens of those steps; None: not known
    failed_drafters: tuple[str, ...] = ()
    why_plain: str | None = None  # why most steps had no drafts; None where that was not so, or is not over

    @property
    def estimated_speedup(self) -> float | None:
        """`speedup` of the steps that read no prompt, at most `acceptance_length`, which is shown beside it and counts
        the prompt's pass, too. None without plain steps, drafts, or `LEAST_JUDGED` tokens."""
        is_told = self.trees.drafted and self.num_tokens - self.num_elsewhere >= LEAST_JUDGED
        gain = speedup(self.plain_s or 0.0, self.step_s)
        return None if gain is None or not is_told else min(gain, max(self.acceptance_length, 1.0))

    @property
    def acceptance_length(self) -> float:
        """Tokens emitted per target pass (tau)."""
        return (self.num_tokens - self.num_elsewhere) / self.num_steps if self.num_steps else 0.0

    @property
    def tokens_per_s(self) -> float:
        """Tokens over the whole time of the answer, reading the prompt included."""
        return self.num_tokens / (self.ttft_s + self.decode_s) if self.ttft_s + self.decode_s > 0 else 0.0


@dataclass(slots=True)
class CompletionOutput:
    """One sample of a request."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    seed: int
    token_sources: tuple[str, ...]  # who drafted each token; "" where the target chose it without a draft
    logprobs: tuple[PositionLogprobs, ...] | None = None
    cumulative_logprob: float | None = None
    error: Exception | None = None
    stats: RequestStats = field(default_factory=RequestStats)


@dataclass(slots=True)
class RequestOutput:
    """All samples of a request, so far or finished."""

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: tuple[PositionLogprobs | None, ...] | None = None
