"""Every step of every drafter on the embedded model, as it was: who is scheduled, what is drafted, what is chosen.

A change of the engine's code that should change nothing must not change these files either. One that should (another
drafter, another shape of trees) writes them anew: FORERUN_WRITE_GOLDEN=1 pytest tests/exactness/test_golden_steps.py
Trees are written as the paths of their nodes, sorted, so that how nodes are numbered does not show.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from forerun import LLM, SamplingParams
from forerun.kernels.select import has_amx
from tests.support.mini import PROMPTS, plain

FOLDER = Path(__file__).parent / "golden_steps"
OPTIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "ngram": {},
    "suffix": {},
    "recycling": {"max_draft_tokens": 12},
    "draft": {"tree_width": 1},
    "draft-tree": {"tree_width": 3, "max_draft_tokens": 12},
    "layer_skip": {},
    "layer_skip-tree": {"layers": (0, 1, 2, 4), "tree_width": 2},
    "medusa": {},
    "eagle": {"tree_width": 1},
    "eagle-tree": {"max_draft_tokens": 12},
    "mtp": {"tree_width": 1},
    "mtp-tree": {"tree_width": 3, "max_draft_tokens": 12},
    "portfolio": {},
}
# what is drawn with (rule, temperature), and parameters that shape each node's logits by its path
KINDS = {
    "T0": ("coupled", {"temperature": 0.0}),
    "T1": ("coupled", {"temperature": 1.0}),
    "T1-shaped": ("coupled", {"temperature": 1.0, "top_p": 0.9, "repetition_penalty": 1.2}),
    "T1-rejection": ("rejection", {"temperature": 1.0}),
}
NUM_TOKENS = 20


class Recorder:
    """Writes down what passes through an engine, step by step."""

    def __init__(self, llm: LLM) -> None:
        self.lines: list[str] = []
        engine = llm.engine
        self._schedule, self._verify = engine.scheduler.schedule, engine.verifier.verify
        self._engine = engine

    def __enter__(self) -> Recorder:
        engine: Any = self._engine
        engine.steady = None  # phase by phase; tests/engine/test_steady.py compares the steps that are made at once
        engine.scheduler.schedule, engine.verifier.verify = self._scheduled, self._verified
        return self

    def __exit__(self, *_: object) -> None:
        engine: Any = self._engine
        engine.steady = None  # phase by phase; tests/engine/test_steady.py compares the steps that are made at once
        engine.scheduler.schedule, engine.verifier.verify = self._schedule, self._verify

    def _scheduled(self, *args: Any) -> Any:
        plan = self._schedule(*args)
        told = [f"{_name(item.request)} span {item.num_span} nodes {item.max_nodes}" for item in plan.scheduled]
        self.lines.append(f"step: {'; '.join(told)}")
        return plan

    def _verified(self, logits: Any, candidates: Sequence[Any]) -> Any:
        choices = self._verify(logits, candidates)
        for candidate, choice in zip(candidates, choices, strict=True):
            tree = candidate.draft.tree
            drafted = sorted((tree.path_tokens(node), tree.sources[node]) for node in range(1, len(tree)))
            paths = " ".join(f"{'>'.join(map(str, path))}:{source}" for path, source in drafted)
            accepted = [tree.tokens[node] for node in choice.nodes[1:]]
            self.lines.append(f"  {_name(candidate.request)} [{paths}] accepts {accepted} then {choice.token}")
        return choices


def _name(request: Any) -> str:
    return f"r{int(request.parent_id) % len(PROMPTS)}"


@cache
def usual() -> LLM:
    """On kernels whose bits all CPUs have: AMX's are others."""
    return LLM("mini", max_num_seqs=16, max_model_len=512, kernels="cpu:avx512vnni") if has_amx() else plain()


def steps(drafter: str, kind: str) -> Iterator[str]:
    """The steps of three requests in one batch, prompts read in chunks, then one of them again from the cache."""
    rule, sampling = KINDS[kind]
    name = drafter.partition("-")[0]
    options = {"verification": rule, "adaptive": False, "max_num_batched_tokens": 24, "max_num_seqs": 3}
    if name == "portfolio":
        name = "portfolio=suffix+draft+eagle"
        options |= {"max_draft_tokens": 12}
    llm = usual().with_drafter(name, **{**options, **OPTIONS[drafter]})
    params = [SamplingParams(max_tokens=NUM_TOKENS, seed=seed, ignore_eos=True, **sampling) for seed in range(4)]
    prompts = [PROMPTS[0], PROMPTS[5], PROMPTS[3]]
    with Recorder(llm) as recorder:
        llm.generate(prompts, params[:3])
        llm.generate([PROMPTS[5]], params[3])
    yield f"# {drafter}, {kind}"
    yield from recorder.lines


@pytest.mark.parametrize("drafter", OPTIONS)
def test_steps_are_as_they_were(drafter: str) -> None:
    found = [line for kind in KINDS for line in steps(drafter, kind)]
    path = FOLDER / f"{drafter}.txt"
    if os.environ.get("FORERUN_WRITE_GOLDEN"):
        path.write_text("\n".join(found) + "\n")
    assert found == path.read_text().splitlines()
