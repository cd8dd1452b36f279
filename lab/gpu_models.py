"""The parts of gpu.py about models: passes at published shapes, drafters end to end, transformers in the same run.

Knows: engines on one set of weights, prompts, transformers' models. Does not know: kernels, results, pictures.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from importlib.util import find_spec
from itertools import accumulate, product
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple, TypeVar

import torch

from forerun import LLM, SamplingParams
from forerun.bench import curve as curves
from forerun.bench.conversation import fitting_cases, run_cases
from forerun.bench.drafters import auto_drafters, needing_nothing
from forerun.bench.passes import TimedPasses
from forerun.bench.prompts import PromptCase, read_prompts
from forerun.bench.shapes import read_shape
from forerun.bench.speed import PLAIN
from forerun.bench.synthetic import RandomGroupedFormat
from forerun.bench.weight_kinds import read_kind
from forerun.core import CompletionOutput
from forerun.kernels.device import synchronize
from forerun.models.batch import ForwardBatch
from forerun.models.build import Builder
from forerun.quant.dense import DenseFormat
from forerun.weights.resolve import resolve_model
from forerun.weights.tokenizer import Tokenizer
from gpu_setting import Bench, BenchSizes, Due, RepeatedSource, back_to_back_s, in_time
from gpu_watch import Noted
from gpu_widen import MODEL as WIDENED

SMALL = "mini"
FIXED = "fixed"  # a drafter that always drafts as many as it may, beside the one that the policy guides
FIRST_BATCHES = 2  # what must be shown is about these
NUM_PLAIN_STEPS = 12
CONTEXT = 40  # known tokens of the pass that the host's share is taken from
Run = tuple[float, list[CompletionOutput]]  # seconds, answers
Item = TypeVar("Item")


def curve(bench: Bench, due: Due, noted: Noted) -> None:
    """`forerun bench curve` at every shape, storage and context, without the host's share of a step."""
    cases = list(product((*reversed(bench.sizes.shapes), *bench.sizes.hybrids), bench.sizes.weights))
    in_time(cases, due, noted, " ".join, partial(curve_rows, bench, due, noted))


def curve_rows(bench: Bench, due: Due, noted: Noted, case: tuple[str, str]) -> Iterator[dict[str, Any]]:
    """One shape and storage."""
    name, weights = case
    sizes, passes = bench.sizes, passes_of(bench, name, weights)
    for context in sizes.contexts[: 1 if name in sizes.hybrids else None]:
        if due.left_s == 0:
            noted.left_out(f"{name} {weights} after {context}")
            continue
        with torch.inference_mode():
            turns = InARow(passes, sizes.passes_a_turn)
            measured = curves.measure(turns, sizes.rows, [context], sizes.repeats, lambda: bench.bandwidth)
        for row in curves.rows(turns.each(measured), passes, sizes.rows):
            share = round(row["gb_per_s"] * 1e9 / bench.bandwidth, 4)
            yield {"shape": name, "weights": weights, **row, "share": share}


@dataclass(frozen=True, slots=True)
class InARow:
    """Passes enqueued several at a time, so that the host is ahead and the GPU's own time is measured."""

    passes: TimedPasses
    number: int

    def chain(self, context: int, tokens: int) -> ForwardBatch:
        """See `TimedPasses.chain`."""
        return self.passes.chain(context, tokens)

    def run(self, batch: ForwardBatch) -> None:
        """So many in a row."""
        for _ in range(self.number):
            self.passes.enqueue(batch)
        synchronize(self.passes.cache.device)

    def bytes_read(self, context: int, tokens: int) -> int:
        """See `TimedPasses.bytes_read`."""
        return self.passes.bytes_read(context, tokens)

    def each(self, measured: curves.Measured[curves.Case]) -> curves.Measured[curves.Case]:
        """Seconds of one."""
        return replace(measured, seconds={case: [span / self.number for span in spans]
                                          for case, spans in measured.seconds.items()})  # fmt: skip


def passes_of(bench: Bench, name: str, weights: str) -> TimedPasses:
    """A model of random weights and a pool for all contexts."""
    shape, kind = read_shape(name), read_kind(weights)
    form = DenseFormat() if kind.grouped is None else RandomGroupedFormat(kind.grouped)
    num_rows = max(bench.sizes.contexts) + max(bench.sizes.rows)
    source = RepeatedSource(kind.dtype)
    model = Builder(shape.config, shape.family, source, bench.kernels, None, num_rows, lambda *_: form).decoder()
    return TimedPasses(model, bench.kernels, num_rows)


# -- drafters --------------------------------------------------------------------------------------------------------


class SpeedCase(NamedTuple):
    """What all drafters are compared in."""

    model: str
    temperature: float
    batch: int
    is_long: bool  # prompts that fill most of the context

    def __str__(self) -> str:
        """In words."""
        length = ", long prompts" if self.is_long else ""
        return f"{self.model}, temperature {self.temperature:g}, batch {self.batch}{length}"


@dataclass(slots=True)
class Opened:
    """A model with all that can draft for it, and what plain decoding has answered so far."""

    engines: dict[str, LLM]
    prompts: dict[bool, list[PromptCase]]  # short and long ones
    about: dict[str, Any]
    answers: dict[tuple[bool, float], list[CompletionOutput]] = field(default_factory=dict)  # each alone

    def expected(self, num: int, is_long: bool, params: SamplingParams) -> list[CompletionOutput]:
        """Plain decoding's answers to so many prompts, one by one."""
        known, cases = self.answers.setdefault((is_long, params.temperature), []), self.prompts[is_long]
        alone = [[cases[index % len(cases)]] for index in range(len(known), num)]
        known += timed(self.engines[PLAIN], alone, params, first=len(known))[1]
        return known[:num]


def speed(bench: Bench, due: Due, noted: Noted) -> None:
    """Every drafter against plain decoding: on mini at the cost of the largest shape that fits, and on mini."""
    models = cache(partial(opened, bench, due, noted))
    in_time(speed_cases(bench.sizes), due, noted, str, partial(speed_rows, bench, noted, models))


def speed_cases(sizes: BenchSizes) -> list[SpeedCase]:
    """Greedy ones first, of these the batches that something must be shown for; long prompts for the small model."""
    first, others = sizes.batches[:FIRST_BATCHES], sizes.batches[FIRST_BATCHES:]
    long = [(SMALL, sizes.batches[0], True)] if sizes.long_model_len else []
    some = [*product((WIDENED, SMALL), first, [False]), *long, *product((WIDENED, SMALL), others, [False])]
    return [SpeedCase(model, heat, batch, is_long) for heat in sizes.temperatures for model, batch, is_long in some]


def speed_rows(
    bench: Bench, noted: Noted, models: Callable[[str], Opened], case: SpeedCase
) -> Iterator[dict[str, Any]]:
    """All drafters in one case."""
    model = models(case.model)
    params = SamplingParams(max_tokens=bench.sizes.max_tokens, temperature=case.temperature, seed=0, ignore_eos=True)
    batches = groups(model.prompts[case.is_long], case.batch, bench.sizes.prompts)
    expected = model.expected(sum(map(len, batches)), case.is_long, params)
    for row in batch_rows(model.engines, batches, expected, params, bench.sizes.runs, noted):
        yield {**model.about, **case._asdict(), **row}


def opened(bench: Bench, due: Due, noted: Noted, name: str) -> Opened:
    """A model and all that can draft for it, as on the command line."""
    target, drafters = (small if name == SMALL else widened)(bench, due, noted)
    sizes = bench.sizes
    longest = max(sizes.max_model_len, sizes.long_model_len) if name == SMALL else sizes.max_model_len
    engines = engines_of(bench, noted, target, drafters, longest)
    plain = engines[PLAIN]
    cases = [replace(case, turns=case.turns[:1]) for case in read_prompts(None) if case.is_chat]
    cases = [case for case in fitting_cases(plain, cases) if len(case.turns[0]) < sizes.max_model_len]
    prompts = {False: cases, True: long_cases(cases, plain, longest - 2 * sizes.max_tokens)}
    return Opened(engines, prompts, {"model": name, **sizes_of(plain, bench), **host_share(plain, bench)})


def long_cases(cases: Sequence[PromptCase], llm: LLM, num_tokens: int) -> list[PromptCase]:
    """From every prompt on as many, one after the other, as together have up to so many tokens."""
    lengths = [len(llm.tokenizer.encode(case.turns[0])) + 1 for case in cases]
    found = []
    for start in range(len(cases)):
        ends = accumulate(lengths[start:] + lengths[:start])
        num = max(1, sum(end <= num_tokens for end in ends))
        texts = [cases[(start + index) % len(cases)].turns[0] for index in range(num)]
        found.append(replace(cases[start], turns=("\n".join(texts),)))
    return found


def small(bench: Bench, _: Due, __: Noted) -> tuple[str, list[str]]:
    """Mini and its drafters."""
    return bench.small, ([f"draft={bench.draft}"] if bench.rehearses else auto_drafters(bench.small, None))


def widened(bench: Bench, due: Due, noted: Noted) -> tuple[str, list[str]]:
    """The widened model, as soon as it is written, and its drafters."""
    folder, heads, errors = bench.widening.result(due.left_s)
    for head, why in errors.items():
        noted.error(f"{WIDENED}: {head}", why)
    draft = f"draft={bench.draft}"
    if bench.rehearses:
        return str(folder), [draft]
    named = [f"{head}={path}" for head, path in heads.items()]
    return str(folder), [*named, draft, *needing_nothing(), f"portfolio=suffix+recycling+{draft}"]


def groups(items: Sequence[Item], batch: int, least: int) -> list[list[Item]]:
    """At least so many items, again from the first where they are too few, in batches."""
    num_batches = max(1, least // batch)
    return [[items[(start * batch + index) % len(items)] for index in range(batch)] for start in range(num_batches)]


def engines_of(bench: Bench, noted: Noted, target: str, drafters: Sequence[str], longest: int) -> dict[str, LLM]:
    """Plain decoding and every drafter on the same weights; a drafter that cannot be had is named with its error."""
    place = {"device": bench.device.type, "kernels": bench.backend}
    plain = LLM(
        target, **place, max_model_len=longest, max_num_seqs=max(bench.sizes.batches),
        prefix_caching=False, across_requests=False, adaptive=not bench.rehearses,
    )  # fmt: skip
    wanted = [(name, name, not bench.rehearses) for name in drafters]
    wanted += [(f"{FIXED} {name}", name, False) for name in drafters if name.startswith("eagle=")]
    engines = {PLAIN: plain}
    for title, name, adaptive in wanted:
        try:
            engines[title] = plain.with_drafter(name, across_requests=False, adaptive=adaptive)
        except Exception:
            noted.error(f"{target}: {title}", traceback.format_exc())
    return engines


def sizes_of(llm: LLM, bench: Bench) -> dict[str, Any]:
    """What the cost of a step comes from, and the shape a model was widened to."""
    model, own = llm.loaded.model, llm.loaded.raw_config
    names = ("hidden_size", "intermediate_size", "num_hidden_layers")
    same = [name for name in bench.sizes.shapes if all(read_shape(name).raw[key] == own.get(key) for key in names)]
    return {"weight_bytes": model.weight_bytes, "num_parameters": model.num_parameters,
            "widened_to": same[0] if same else None}  # fmt: skip


def host_share(llm: LLM, bench: Bench) -> dict[str, Any]:
    """How much longer a plain step of one request is than the GPU's part of it, a pass among many in a row."""
    with torch.inference_mode():
        passes: Any = TimedPasses(llm.loaded.model, llm.kernels, CONTEXT + 1)  # type: ignore[arg-type]
        batch = passes.chain(CONTEXT, 1)
        run = partial(passes.runner.run, batch)
        pass_s = back_to_back_s(run, bench.device, bench.sizes.passes)
    step_s = plain_step_s(llm)
    return {"step_ms": round(step_s * 1e3, 4), "pass_ms": round(pass_s * 1e3, 4),
            "host_share": round(step_s / pass_s - 1, 4)}  # fmt: skip


def plain_step_s(llm: LLM) -> float:
    """Seconds of a plain step of one request."""
    room = CONTEXT + NUM_PLAIN_STEPS + 1
    plain = llm.with_drafter("none", max_model_len=room, max_num_seqs=1, num_kv_blocks=None, kv_cache_bytes=None)
    params = SamplingParams(max_tokens=NUM_PLAIN_STEPS, ignore_eos=True, temperature=0.0)
    stats = plain.generate([[17 + index for index in range(CONTEXT)]], params)[0].outputs[0].stats
    return stats.decode_s / max(1, stats.num_steps - 1)


def batch_rows(
    engines: Mapping[str, LLM], batches: Sequence[Sequence[PromptCase]], expected: Sequence[CompletionOutput],
    params: SamplingParams, num_runs: int, noted: Noted,
) -> list[dict[str, Any]]:  # fmt: skip
    """All engines in turns, after a run each that does not count; tokens against plain decoding one by one."""
    runs: dict[str, list[Run]] = {name: [] for name in engines}
    for turn in range(num_runs + 1):
        for name in list(runs):
            try:
                run = timed(engines[name], batches, params)
                runs[name] += [run] if turn else []
            except Exception:
                noted.error(f"{name}, batch {len(batches[0])}", traceback.format_exc())
                del runs[name]
    plain_s = median(seconds for seconds, _ in runs[PLAIN])
    return [{"drafter": name, **figures(own, expected, plain_s)} for name, own in runs.items()]


def figures(runs: Sequence[Run], expected: Sequence[CompletionOutput], plain_s: float) -> dict[str, Any]:
    """Medians over runs, and whether every token of every run is plain decoding's."""
    seconds = median(seconds for seconds, _ in runs)
    stats = [answer.stats for _, answers in runs for answer in answers]
    wanted = [answer.token_ids for answer in expected]
    return {
        "tokens_per_s": round(sum(map(len, wanted)) / seconds, 2),
        "speedup": round(plain_s / seconds, 4),
        "acceptance_length": round(sum(s.num_tokens for s in stats) / max(1, sum(s.num_steps for s in stats)), 3),
        "num_failed": sum(len(s.failed_drafters) for s in stats),
        "identical": all([answer.token_ids for answer in answers] == wanted for _, answers in runs),
    }


def timed(llm: LLM, batches: Sequence[Sequence[PromptCase]], params: SamplingParams, first: int = 0) -> Run:
    """Seconds of all batches, one after the other, and the answers; every prompt has a seed of its own from `first`."""
    answers, number = [], first
    synchronize(llm.kernels.device)
    start = perf_counter()
    for batch in batches:
        seeded = [params.with_seed(number + index) for index in range(len(batch))]
        answers += [turns[0] for turns in run_cases(llm, batch, seeded)]
        number += len(batch)
    return perf_counter() - start, answers


# -- transformers ----------------------------------------------------------------------------------------------------


def peers(bench: Bench, due: Due, noted: Noted) -> None:
    """transformers on the same models and prompts, greedy: `generate`, and assisted by the draft model."""
    if not find_spec("transformers"):
        noted.left_out("transformers is not installed")
        return
    folders = {WIDENED: lambda: str(bench.widening.result(due.left_s).folder), SMALL: lambda: bench.small}
    models = cache(lambda name: transformers_model(folders[name](), bench))
    assistant = cache(lambda: transformers_model(bench.draft, bench))
    in_time(peer_cases(bench.sizes), due, noted, " ".join, partial(peer_rows, bench, models, assistant))


def peer_cases(sizes: BenchSizes) -> list[tuple[str, str, str]]:
    """Model, method, batch; assisted generation takes one prompt at a time."""
    first, *others = sizes.batches
    stages = [("generate", first), ("assisted", 1)], [("generate", batch) for batch in others]
    return [
        (model, method, f"batch {batch}")
        for some in stages
        for model, (method, batch) in product((WIDENED, SMALL), some)
    ]


def peer_rows(
    bench: Bench, models: Callable[[str], Any], assistant: Callable[[], Any], case: tuple[str, str, str]
) -> Iterator[dict[str, Any]]:
    """One method on one model, after a prompt that does not count."""
    name, method, batch = case[0], case[1], int(case[2].removeprefix("batch "))
    model, prompts = models(name), encoded(bench)
    options = {"assistant_model": assistant()} if method == "assisted" else {}
    generated(model, prompts[:1], bench, options)
    spans = [generated(model, group, bench, options) for group in groups(prompts, batch, bench.sizes.peer_prompts)]
    rate = bench.sizes.max_tokens * sum(num for num, _ in spans) / sum(seconds for _, seconds in spans)
    yield {"model": name, "method": method, "batch": batch, "tokens_per_s": round(rate, 2)}


def transformers_model(name: str, bench: Bench) -> Any:
    """As its users load it, in bfloat16; straight to the device where `accelerate` is there to do so."""
    from transformers import AutoModelForCausalLM

    place = {"device_map": {"": bench.device}} if find_spec("accelerate") else {}
    model: Any = AutoModelForCausalLM.from_pretrained(resolve_model(name), dtype=torch.bfloat16, **place)
    return model.to(bench.device).eval()


def encoded(bench: Bench) -> list[list[int]]:
    """The prompts as token ids, those that leave room for an answer."""
    tokenizer = Tokenizer.from_folder(resolve_model(bench.small))
    room = bench.sizes.max_model_len - bench.sizes.max_tokens
    texts = [case.turns[0] for case in read_prompts(None) if case.is_chat]
    if tokenizer.chat_template is None:
        ids = [tokenizer.encode(text) for text in texts]
    else:
        ids = [tokenizer.encode_chat([{"role": "user", "content": text}]) for text in texts]
    return [prompt for prompt in ids if len(prompt) <= room]


def generated(
    model: Any, prompts: Sequence[Sequence[int]], bench: Bench, options: Mapping[str, Any]
) -> tuple[int, float]:
    """A batch of prompts, filled up on the left -> how many they are, and seconds."""
    longest = max(map(len, prompts))
    ids = torch.tensor(
        [[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts], device=bench.device
    )  # [B, T]
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=bench.device)
    number = bench.sizes.max_tokens
    synchronize(bench.device)
    start = perf_counter()
    with torch.inference_mode():
        out = model.generate(ids, attention_mask=mask, max_new_tokens=number, min_new_tokens=number, do_sample=False,
                             pad_token_id=0, **options)  # fmt: skip
        synchronize(bench.device)
    assert out.shape == (len(prompts), longest + number)
    return len(prompts), perf_counter() - start
