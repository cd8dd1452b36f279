"""The parts of gpu.py about models: passes at published shapes, drafters end to end, transformers in the same run.

Knows: widened copies of mini in a temporary folder. Does not know: kernels, results, pictures.
"""

from __future__ import annotations

import shutil
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, TypeVar

import torch
from gpu_compile import ahead
from gpu_setting import Bench, Due, back_to_back_s, in_time
from gpu_watch import Noted

from forerun import LLM, SamplingParams
from forerun.bench import curve as curves
from forerun.bench.conversation import fitting_cases, run_cases
from forerun.bench.drafters import ANY_MODEL, auto_drafters
from forerun.bench.passes import Passes
from forerun.bench.plain import plain_step_s
from forerun.bench.prompts import PromptCase, read_prompts
from forerun.bench.random_model import random_model
from forerun.bench.shapes import Shape, read_shape
from forerun.bench.speed import PLAIN
from forerun.bench.weight_kinds import read_kind
from forerun.bench.widen import open_source, widen
from forerun.bench.widen_heads import WidenedTarget, widen_head
from forerun.bench.widen_sizes import Sizes as WidenedSizes
from forerun.core import CompletionOutput
from forerun.kernels.device import synchronize
from forerun.models.config import ModelConfig, num_parameters
from forerun.models.memory import memory_of
from forerun.weights.resolve import resolve_model
from forerun.weights.tokenizer import Tokenizer

SMALL, WIDENED = "mini", "widened"
FIXED = "fixed"  # a drafter whose drafts nobody looks at before they are verified, so that a step waits once
HEADS = ("eagle", "mtp", "medusa")  # what must be shown first
ROOM = 3  # a widened model's bytes must be there so often on the card: weights, engines' pools, transformers' copy
COMPILE_S = 40  # seconds for the widened model's kernels
CONTEXT = 40  # known tokens of the pass that the host's share is taken from
Run = tuple[float, list[CompletionOutput]]  # seconds, answers
Item = TypeVar("Item")


def curve(bench: Bench, due: Due, noted: Noted) -> None:
    """`forerun bench curve` at every shape, storage and context."""
    cases = list(product(reversed(bench.sizes.shapes), bench.sizes.weights))
    in_time(cases, due, noted, " ".join, partial(curve_rows, bench, due))


def curve_rows(bench: Bench, due: Due, case: tuple[str, str]) -> Iterator[dict[str, Any]]:
    """One shape and storage; contexts that come too late are missing."""
    name, weights = case
    shape, sizes = read_shape(name), bench.sizes
    model = random_model(shape, read_kind(weights), bench.kernels, max(sizes.contexts) + max(sizes.rows))
    for context in (context for context in sizes.contexts if due.left_s):
        with torch.inference_mode():
            measured = curves.measure(model.passes, sizes.rows, [context], sizes.repeats, lambda: bench.bandwidth)
        for row in curves.rows(measured, model.passes, sizes.rows):
            share = round(row["gb_per_s"] * 1e9 / bench.bandwidth, 4)
            yield {"shape": name, "weights": weights, **row, "share": share}


def speed(bench: Bench, due: Due, noted: Noted) -> None:
    """Every drafter against plain decoding: on mini at the cost of the largest shape that fits, then on mini."""
    in_time((WIDENED, SMALL), due, noted, str, partial(model_rows, bench, due, noted))


def model_rows(bench: Bench, due: Due, noted: Noted, name: str) -> Iterator[dict[str, Any]]:
    """All batches and temperatures on one model, greedy first."""
    engines = engines_of(bench, noted, *opened(bench, noted, name))
    cases = [replace(case, turns=case.turns[:1]) for case in read_prompts(None) if case.is_chat]
    cases = fitting_cases(engines[PLAIN], cases)
    about: dict[str, Any] = {"model": name, **sizes_of(engines[PLAIN], bench), **host_share(engines[PLAIN], bench)}
    for temperature, batch in product(bench.sizes.temperatures, bench.sizes.batches):
        if due.left_s == 0:
            noted.left_out(f"{name}, temperature {temperature}, batch {batch}")
            continue
        params = SamplingParams(max_tokens=bench.sizes.max_tokens, temperature=temperature, seed=0, ignore_eos=True)
        for row in batch_rows(engines, groups(cases, batch, bench.sizes.prompts), params, bench.sizes.runs, noted):
            yield {**about, "temperature": temperature, "batch": batch, **row}


def groups(items: Sequence[Item], batch: int, least: int) -> list[list[Item]]:
    """At least so many items, again from the first where they are too few, in batches."""
    num_batches = max(1, least // batch)
    return [[items[(start * batch + index) % len(items)] for index in range(batch)] for start in range(num_batches)]


def opened(bench: Bench, noted: Noted, name: str) -> tuple[str, list[str]]:
    """A model and all that can draft for it, as on the command line; the widened one is written when first needed."""
    if name == SMALL:
        return bench.small, ([f"draft={bench.draft}"] if bench.rehearses else auto_drafters(name, None))
    folder, source = bench.folder / WIDENED, open_source(resolve_model(bench.small))
    if not folder.exists():
        widen(source, chosen_sizes(bench, source[1]), folder, bench.small)
        compile_widened(bench, noted, folder)
    heads = [] if bench.rehearses else heads_of(bench, noted, folder)
    draft = f"draft={bench.draft}"
    lookups = ("ngram",) if bench.rehearses else ANY_MODEL
    return str(folder), [*heads, draft, *lookups, f"portfolio=suffix+recycling+{draft}"][
        : 1 if bench.rehearses else None
    ]


def compile_widened(bench: Bench, noted: Noted, folder: Path) -> None:
    """On all cores instead of one after the other; without that, all goes on slower."""
    if not bench.rehearses:
        try:
            ahead([str(folder)], ["bf16"], bench.sizes.compiled_rows, bench.device, COMPILE_S)
        except Exception:
            noted.error(f"{WIDENED}: compiling", traceback.format_exc())


def heads_of(bench: Bench, noted: Noted, target: Path) -> list[str]:
    """Mini's heads for the widened model, as drafters; one that cannot be had is named."""
    names = []
    for head in HEADS:
        out = bench.folder / f"widened-{head}"
        try:
            if not out.exists():
                widen_head(WidenedTarget.open(target), resolve_model(f"mini-{head}"), out)
            names.append(f"{head}={out}")
        except Exception:
            noted.error(f"{WIDENED}: {head}", traceback.format_exc())
    return names


def chosen_sizes(bench: Bench, config: ModelConfig) -> WidenedSizes:
    """The largest shape that card and disk have room for; twice the width where none has, and to rehearse."""
    for name in reversed(bench.sizes.shapes if not bench.rehearses else ()):
        needed, free = 2 * num_parameters(read_shape(name).config), memory_of(bench.device)
        if shutil.disk_usage(bench.folder).free > 1.2 * needed and (free is None or free > ROOM * needed):
            return as_wide(config, read_shape(name))
    return replace(WidenedSizes.of(config), hidden_size=2 * config.hidden_size, ffn_size=2 * config.ffn_size)


def as_wide(config: ModelConfig, shape: Shape) -> WidenedSizes:
    """The shape's sizes with as many entries of queries, keys and values, in heads of `config`'s size."""
    wanted, own = WidenedSizes.of(shape.config), config.heads.head_dim
    per_head = shape.config.heads.head_dim // own
    return replace(wanted, num_q=wanted.num_q * per_head, num_kv=wanted.num_kv * per_head)


def engines_of(bench: Bench, noted: Noted, target: str, drafters: Sequence[str]) -> dict[str, LLM]:
    """Plain decoding and every drafter on the same weights; a drafter that cannot be had is named with its error."""
    place = {"device": bench.device.type, "kernels": "triton"}
    plain = LLM(
        target, **place, max_model_len=bench.sizes.max_model_len, max_num_seqs=max(bench.sizes.batches),
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
    """How much longer a plain step of one request is than the card's part of it, a pass among many in a row."""
    with torch.inference_mode():
        passes: Any = Passes(llm.loaded.model, llm.kernels, CONTEXT + 1)  # type: ignore[arg-type]
        batch = passes.chain(CONTEXT, 1)
        run = partial(passes.model.forward, batch, passes.cache.layers)
        pass_s = back_to_back_s(run, bench.device, bench.sizes.passes)
    step_s = plain_step_s(llm, [17 + index for index in range(CONTEXT)])
    return {"step_ms": round(step_s * 1e3, 4), "pass_ms": round(pass_s * 1e3, 4),
            "host_share": round(step_s / pass_s - 1, 4)}  # fmt: skip


def batch_rows(
    engines: Mapping[str, LLM], batches: Sequence[Sequence[PromptCase]], params: SamplingParams, num_runs: int,
    noted: Noted,
) -> list[dict[str, Any]]:  # fmt: skip
    """All engines in turns, after a run each that does not count; tokens against plain decoding one by one."""
    alone = [[case] for batch in batches for case in batch]
    expected = timed(engines[PLAIN], alone, params)[1]
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
        "num_failed": sum(s.draft_errors for s in stats),
        "identical": all([answer.token_ids for answer in answers] == wanted for _, answers in runs),
    }


def timed(llm: LLM, batches: Sequence[Sequence[PromptCase]], params: SamplingParams) -> Run:
    """Seconds of all batches, one after the other, and the answers; every prompt has a seed of its own."""
    answers, number = [], 0
    synchronize(llm.kernels.device)
    start = perf_counter()
    for batch in batches:
        seeded = [params.with_seed(number + index) for index in range(len(batch))]
        answers += [turns[0] for turns in run_cases(llm, batch, seeded)]
        number += len(batch)
    return perf_counter() - start, answers


def peers(bench: Bench, due: Due, noted: Noted) -> None:
    """transformers on the same models and prompts, greedy: `generate`, and assisted by the draft model."""
    in_time((WIDENED, SMALL), due, noted, str, partial(peer_rows, bench, due, noted))


def peer_rows(bench: Bench, due: Due, noted: Noted, name: str) -> Iterator[dict[str, Any]]:
    """One model. Assisted generation takes one prompt at a time."""
    model, assistant = (transformers_model(which, bench) for which in (opened(bench, noted, name)[0], bench.draft))
    prompts = encoded(bench)
    batches = bench.sizes.batches
    for method, batch in [("generate", batches[0]), ("assisted", 1), *(("generate", size) for size in batches[1:])]:
        if due.left_s == 0:
            noted.left_out(f"{name}: {method}, batch {batch}")
            continue
        options = {"assistant_model": assistant} if method == "assisted" else {}
        generated(model, prompts[:1], bench, options)
        spans = [generated(model, group, bench, options) for group in groups(prompts, batch, bench.sizes.prompts)]
        rate = bench.sizes.max_tokens * sum(num for num, _ in spans) / sum(seconds for _, seconds in spans)
        yield {"model": name, "method": method, "batch": batch, "tokens_per_s": round(rate, 2)}


def transformers_model(name: str, bench: Bench) -> Any:
    """As its users load it, in bfloat16."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(resolve_model(name), dtype=torch.bfloat16)
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
