"""Random engines, requests and what happens to them, all from one seed.

Knows: every option that must not change tokens, and parameters of requests of every kind. Does not know: what is
compared. `World` is a model with a plain engine and the drafters that fit it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

from forerun import LLM, SamplingParams
from forerun.core import GrammarMask
from forerun.drafters.named import only_read

PLAIN = {"max_num_seqs": 1, "max_model_len": 64, "prefix_caching": False, "threads": 1}
COMMON = ("none", "ngram", "suffix", "recycling", "draft", "portfolio=suffix+recycling+draft")
STATELESS = ("none", "ngram", "suffix", "recycling")
NATIVE = (*COMMON, "layer_skip", "portfolio=layer_skip+ngram")
HEADS = ("medusa", "eagle", "mtp", "portfolio=suffix+eagle", "portfolio=recycling+mtp+medusa")


@dataclass(frozen=True)
class World:
    """A model, its plain engine, and what may be asked of it."""

    name: str
    plain: LLM
    draft_model: str
    drafters: tuple[str, ...]
    texts: tuple[str, ...] = ()  # that prompts begin with, beside random tokens
    grammars: tuple[Callable[[], GrammarMask], ...] = ()


@dataclass
class Clock:
    """Time for deadlines: a second a step of any engine."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass(frozen=True)
class Asked:
    """A request, when it comes and when it is given up."""

    prompt: list[int]
    params: SamplingParams
    make_grammar: Callable[[], GrammarMask] | None
    options: dict[str, Any]  # of `LLM.prepare`, deadline_s apart
    arrives: int  # step of its engine
    aborted: int | None  # likewise
    moves: int | None  # likewise: when an engine begins anew with it, behind the tokens it has then
    patience_s: int | None

    def sampling(self) -> SamplingParams:
        """The parameters, with a grammar that has seen nothing."""
        return self.params if self.make_grammar is None else replace(self.params, grammar=self.make_grammar())


@dataclass(frozen=True)
class EvenOdd:
    """Which half of the vocabulary may follow depends on what has been written."""

    vocab_size: int

    def allowed(self, output_token_ids: Sequence[int]) -> Sequence[int]:
        return range(sum(output_token_ids) % 2, self.vocab_size, 2)


@dataclass
class Dice:
    """Everything that is random in one scenario."""

    world: World
    rng: Random
    prefixes: list[list[int]] = field(default_factory=list)  # that prompts of all engines share

    def __post_init__(self) -> None:
        texts = [self.world.plain.tokenizer.encode(text) for text in self.world.texts]
        self.prefixes = [self.tokens(self.rng.randint(4, 40)) for _ in range(2)] + texts

    def maybe(self, chance: float) -> bool:
        return self.rng.random() < chance

    def tokens(self, num: int) -> list[int]:
        """Random ones, often from a few, so that texts repeat."""
        vocab_size = self.world.plain.loaded.model.vocab_size
        few = [self.rng.randrange(3, vocab_size) for _ in range(self.rng.choice((3, 8, 40)))]
        return [self.rng.choice(few) for _ in range(num)]

    def engine(self) -> LLM:
        """An engine with any drafter, seats, rows and blocks; few enough of these that requests are preempted."""
        rng, world = self.rng, self.world
        drafter, block_size = rng.choice(world.drafters), rng.choice((4, 8, 16))
        needed = -(-world.plain.max_model_len // block_size)
        options: dict[str, Any] = {
            "max_num_seqs": rng.choice((1, 2, 4, 8)),
            "max_num_batched_tokens": rng.choice((3, 16, 70, 512)),
            "max_num_prefill_tokens": rng.choice((None, 1, 7)),
            "max_num_batched_nodes": rng.choice((None, None, 6)),
            "prefix_caching": self.maybe(0.8),
            "block_size": block_size,
            "num_kv_blocks": rng.choice((None, needed, needed + 3)),
            "max_draft_tokens": rng.randint(1, 12),
            "tree_width": rng.choice((None, 1, 2, 4)),
            "adaptive": self.maybe(0.1),
        }
        if "draft" in drafter:
            options["draft_model"] = world.draft_model
        return world.plain.with_drafter(drafter, **only_read(world.plain.config.model, drafter, options))

    def request(self) -> Asked:
        """Any parameters, in any mixture that is not refused."""
        rng = self.rng
        prefix = rng.choice(self.prefixes)[: rng.randint(0, 60)]
        longest = self.world.plain.max_model_len - 1
        prompt = [*prefix, *self.tokens(rng.randint(0 if prefix else 1, 12))][:longest]
        grammar = rng.choice(self.world.grammars) if self.maybe(0.2) else None
        return Asked(
            prompt=prompt,
            params=self.params(grammar is not None),
            make_grammar=grammar,
            options=self.speculation(),
            arrives=rng.choice((0, 0, rng.randint(1, 30))),
            aborted=rng.randint(0, 40) if self.maybe(0.12) else None,
            moves=rng.randint(0, 30) if self.maybe(0.2) else None,
            patience_s=rng.randint(1, 40) if self.maybe(0.12) else None,
        )

    def speculation(self) -> dict[str, Any]:
        rng, options = self.rng, dict[str, Any]()
        if self.maybe(0.15):
            options["speculate"] = False
        if self.maybe(0.2):
            options["max_nodes"] = rng.randint(1, 6)
        if self.maybe(0.3):
            options["priority"] = rng.randint(-3, 3)
        return options

    def params(self, has_grammar: bool) -> SamplingParams:
        rng, vocab_size = self.rng, self.world.plain.loaded.model.vocab_size
        some = [rng.randrange(vocab_size) for _ in range(8)]
        kinds: dict[str, dict[str, Any]] = {
            "filters": {"top_k": rng.choice((0, 1, 5, 40)), "top_p": rng.choice((1.0, 0.8)), "min_p": 0.02},
            "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.6, "frequency_penalty": -0.4},
            "bias": {"logit_bias": {some[0]: 4.0, some[1]: -100.0}},
            "bad words": {"bad_words": (self.piece(), self.piece() + self.piece())},
            "stops": {"stop": tuple(self.piece() for _ in range(rng.randint(1, 3)))},
            "shown stops": {"stop": (self.piece(),), "include_stop_str_in_output": True},
            "stop tokens": {"stop_token_ids": tuple(some), "min_tokens": 2},
            "log-probabilities": {"logprobs": 2, "prompt_logprobs": rng.choice((None, 1))},
            "special tokens": {"skip_special_tokens": False},
        }
        if not has_grammar:
            kinds["allowed"] = {"allowed_token_ids": tuple(range(some[2] % 7, vocab_size, 7))}
        chosen = [options for options in kinds.values() if self.maybe(0.2)]
        return SamplingParams(
            n=rng.choice((1, 1, 1, 2, 3)),
            seed=rng.getrandbits(32),
            temperature=rng.choice((0.0, 0.0, 0.4, 1.0)),
            ignore_eos=self.maybe(0.7),
            max_tokens=rng.choice((4, 12, 24, None) if self.maybe(0.3) else (4, 12, 20)),
            **{name: value for options in chosen for name, value in options.items()},
        )

    def piece(self) -> str:
        """A text the model may well write."""
        text = self.world.plain.tokenizer.decode(self.tokens(2)).strip()
        return text[: self.rng.randint(1, 4)] or "e"
