"""The engine's own promises: stops, errors of single requests, figures, and what it leaves behind."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch

from forerun.core import SamplingParams
from forerun.engine.stopping import OutputText
from forerun.errors import LogitsError
from tests.support import harness
from tests.support.toy import ToyModel


class Scripted(ToyModel):
    """After prompt token p the greedy text is p+1, p+2, ...; logits of `poison` tokens are NaN."""

    def __init__(self, poison: int | None = None) -> None:
        super().__init__()
        self._poison = poison

    def logits(self, tokens: list[int]) -> torch.Tensor:
        row = torch.zeros(self.vocab_size)
        row[(tokens[-1] + 1) % self.vocab_size] = 9.0
        if tokens[-1] == self._poison:
            row[3] = math.nan
        return row


def greedy(**options) -> SamplingParams:  # type: ignore[no-untyped-def]
    return SamplingParams(temperature=0.0, **options)


def finish(group, drafter: str = "none", model: ToyModel | None = None):  # type: ignore[no-untyped-def]
    harness.run(harness.engine(drafter, model=model or Scripted()), [group])
    return group.output().outputs[0]


@pytest.mark.parametrize("drafter", ["none", "ngram", "draft", "draft-tree"])
class TestStops:
    def test_length(self, drafter: str) -> None:
        out = finish(harness.request(0, [0], greedy(max_tokens=7)), drafter)
        assert (out.text, out.finish_reason, out.stop_reason) == ("bcdefgh", "length", None)

    def test_stop_token(self, drafter: str) -> None:
        out = finish(harness.request(0, [0], greedy(max_tokens=20, stop_token_ids=[4])), drafter)
        assert (out.text, out.finish_reason, out.stop_reason) == ("bcd", "stop", 4)
        assert out.token_ids == (1, 2, 3, 4)

    def test_stop_string_across_tokens(self, drafter: str) -> None:
        out = finish(harness.request(0, [0], greedy(max_tokens=20, stop=["efg", "zz"])), drafter)
        assert (out.text, out.finish_reason, out.stop_reason) == ("bcd", "stop", "efg")
        assert out.token_ids == (1, 2, 3, 4, 5, 6)

    def test_stop_string_shown(self, drafter: str) -> None:
        out = finish(
            harness.request(0, [0], greedy(max_tokens=20, stop="ef", include_stop_str_in_output=True)), drafter
        )
        assert out.text == "bcdef"

    def test_min_tokens_delays_the_stop_string(self, drafter: str) -> None:
        out = finish(harness.request(0, [0], greedy(max_tokens=60, min_tokens=20, stop="c")), drafter)
        assert out.finish_reason == "stop" and len(out.token_ids) == 26

    def test_stop_before_the_prompt_repeats(self, drafter: str) -> None:
        """A stop string is looked for in the output only."""
        out = finish(harness.request(0, [4, 5, 4, 5], greedy(max_tokens=3, stop="ef")), drafter)
        assert out.text == "ghi"


def test_stop_string_is_held_back_while_it_may_begin() -> None:
    group = harness.request(0, [0], greedy(max_tokens=20, stop="cdx"))
    made = harness.engine("none", model=Scripted())
    made.add(group)
    shown = []
    while made.has_work:
        made.step()
        shown.append(group.output().outputs[0].text)
    assert shown[:4] == ["b", "b", "b", "bcde"]
    assert all(later.startswith(earlier) for earlier, later in pairwise(shown))


@pytest.mark.parametrize("drafter", ["none", "ngram", "draft"])
@pytest.mark.parametrize("verification", ["coupled", "rejection"])
def test_nan_ends_one_request_and_no_other(drafter: str, verification: str) -> None:
    groups = [harness.request(i, [i], greedy(max_tokens=10)) for i in (0, 6, 12)]
    made = harness.engine(drafter, model=Scripted(poison=9), verification=verification)
    harness.run(made, groups)
    outs = [g.output().outputs[0] for g in groups]
    assert [o.finish_reason for o in outs] == ["error", "error", "length"]
    assert isinstance(outs[0].error, LogitsError) and "NaN" in str(outs[0].error)
    assert outs[0].token_ids == tuple(range(1, 10))
    assert outs[1].token_ids == (7, 8, 9)


@pytest.mark.parametrize("drafter", ["none", "draft", "draft-tree"])
@pytest.mark.parametrize("verification", ["coupled", "rejection"])
@pytest.mark.parametrize("params", [{}, {"repetition_penalty": 1.0001}])
def test_an_error_below_accepted_drafts_costs_no_tokens(
    drafter: str, verification: str, params: dict[str, float]
) -> None:
    """The draft model has no NaN, so it drafts the token after which the target has one, and others behind it."""
    for stops, reason in (((), "error"), ((9,), "stop")):
        made = harness.engine(drafter, model=Scripted(poison=9), draft=Scripted(), verification=verification)
        group = harness.request(0, [0], greedy(max_tokens=20, stop_token_ids=stops, **params))
        harness.run(made, [group])
        out = group.output().outputs[0]
        assert out.token_ids == tuple(range(1, 10)) and out.finish_reason == reason
        assert drafter == "none" or out.stats.num_steps < 9


def test_no_token_allowed_is_an_error_of_its_request() -> None:
    class Nothing:
        def allowed(self, output_token_ids):  # type: ignore[no-untyped-def]
            return [] if len(output_token_ids) == 3 else None

    groups = [
        harness.request(0, [0], greedy(max_tokens=6, grammar=Nothing())),
        harness.request(1, [1], greedy(max_tokens=6)),
    ]
    harness.run(harness.engine("draft", model=Scripted()), groups)
    outs = [g.output().outputs[0] for g in groups]
    assert outs[0].finish_reason == "error" and len(outs[0].token_ids) == 3
    assert outs[1].finish_reason == "length"


def test_figures_add_up() -> None:
    group = harness.request(0, [1, 2, 3, 1, 2], SamplingParams(max_tokens=30, temperature=0.0))
    out = finish(group, "draft", ToyModel())
    stats = out.stats
    accepted = sum(c.accepted for c in stats.drafters.values())
    drafted = sum(c.drafted for c in stats.drafters.values())
    assert stats.num_tokens == len(out.token_ids) == 30
    assert stats.num_tokens - stats.num_steps <= accepted <= stats.num_tokens
    assert drafted >= accepted > 0
    assert stats.acceptance_length == pytest.approx(30 / stats.num_steps)
    assert len(out.token_sources) == 30
    assert sum(source == "draft" for source in out.token_sources) == accepted
    assert stats.num_prompt_tokens == 5 and stats.ttft_s > 0 and stats.tokens_per_s > 0


def test_abort_waiting_running_and_unknown() -> None:
    made = harness.engine("none", max_num_seqs=1)
    groups = [harness.request(i, [i], SamplingParams(max_tokens=9, n=2)) for i in range(2)]
    for group in groups:
        made.add(group)
    made.step()
    made.abort("1")
    made.abort("no such request")
    made.scheduler.check_integrity()
    harness.run(made, [])
    assert {s.request.finish_reason for s in groups[1].samples} == {"abort"}
    assert {s.request.finish_reason for s in groups[0].samples} == {"length"}


def test_output_text_is_cut_at_the_first_of_several_stops() -> None:
    class Pieces:
        def feed(self, token_ids):  # type: ignore[no-untyped-def]
            return {0: "one ", 1: "two STOP and END"}[token_ids[0]]

        def finish(self) -> str:
            return ""

    request = harness.request(0, [5], SamplingParams(max_tokens=9, stop=["END", "STOP"])).samples[0].request
    text = OutputText(request, Pieces())
    assert text.take([0, 1, 0]) == 2
    assert (text.text, request.stop_reason) == ("one two ", "STOP")


@pytest.mark.parametrize(("max_nodes", "most"), [(1, 0), (3, 2), (None, 4)])
def test_a_request_bounds_its_trees_whatever_the_policy(max_nodes: int | None, most: int) -> None:
    group = harness.request(0, [0], greedy(max_tokens=30))
    group.samples[0].request.max_nodes = max_nodes
    trees = finish(group, "draft").stats.trees
    assert len(trees.depths) == most and (trees.drafted > 0) == (most > 0)
