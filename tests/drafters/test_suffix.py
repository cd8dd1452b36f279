"""The suffix drafter: what it proposes, what requests share, what is forgotten, and that its trees verify exactly."""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import pytest

from forerun.bench.prompts import read_prompts
from forerun.config import DrafterConfig
from forerun.core import Request, SamplingParams
from forerun.drafters.base import Drafter
from forerun.drafters.ngram import NgramDrafter, select_index
from forerun.drafters.suffix import SuffixDrafter
from forerun.errors import ConfigError
from forerun.kernels.suffix import reference_suffix, select_suffix
from forerun.speculation import verify
from forerun.speculation.draft import Draft
from forerun.speculation.tree import ROOT
from tests.speculation.test_verify_exact import Coins, branches, largest_difference, spread, table, target_law
from tests.support import harness, mini


def suffix(max_draft_tokens: int = 12, **options: object) -> SuffixDrafter:
    return SuffixDrafter(max_draft_tokens, select_suffix(), **options)  # type: ignore[arg-type]


def request(name: str, prompt: Sequence[int]) -> Request:
    return Request(name, tuple(prompt), SamplingParams(max_tokens=1000), seed=0, max_len=10_000)


def propose(drafter: Drafter, wanted: Request, max_nodes: int | None = None) -> Draft:
    draft = Draft(wanted, max_nodes or drafter.max_nodes)
    drafter.propose([draft])
    return draft


def answer(drafter: Drafter, wanted: Request, truth: Sequence[int]) -> int:
    """Steps the engine would take to say `truth`."""
    drafter.begin(wanted)
    num_steps, said = 0, 0
    while said < len(truth):
        tree, node = propose(drafter, wanted).tree, ROOT
        for token in truth[said:]:
            wanted.token_ids.append(token)
            said += 1
            child = tree.child_with(node, token)
            if child is None:
                break
            node = child
        num_steps += 1
    return num_steps


def quoting(seed: int) -> tuple[list[int], list[int]]:
    """A prompt of common phrases, each of which has a usual and a rarer successor, and an answer of the same kind."""
    rng = random.Random(seed)
    phrases = [[rng.randrange(300) for _ in range(rng.randint(2, 5))] for _ in range(25)]
    successors = [rng.sample(range(25), 2) for _ in phrases]
    said, phrase = [], 0
    for _ in range(150):
        said.append(phrases[phrase])
        phrase = successors[phrase][rng.random() < 0.25]
    return [t for each in said[:100] for t in each], [t for each in said[100:] for t in each]


def answers_of_mini() -> list[tuple[list[int], list[int]]]:
    """The embedded model's sampled answers to the prompts that are shipped, many of which quote them."""
    prompts = [case.turns[0] for case in read_prompts(None)]
    params = [
        SamplingParams(max_tokens=128, temperature=0.7, seed=seed, ignore_eos=True) for seed in range(len(prompts))
    ]
    outputs = mini.plain().generate(prompts, params)
    return [(list(output.prompt_token_ids), list(output.outputs[0].token_ids)) for output in outputs]


def test_beats_prompt_lookup_on_answers_of_a_model() -> None:
    answers = answers_of_mini()
    usual = DrafterConfig(name="ngram")
    for num_drafts in (5, 12):
        drafters: dict[str, Drafter] = {
            "suffix": suffix(num_drafts, corpus_tokens=0),
            "usual": NgramDrafter(num_drafts, usual.ngram_min, usual.ngram_max, select_index()),
            "eager": NgramDrafter(num_drafts, 1, usual.ngram_max, select_index()),
        }
        steps = dict.fromkeys(drafters, 0)
        for index, (prompt, truth) in enumerate(answers):
            for name, drafter in drafters.items():
                steps[name] += answer(drafter, request(str(index), prompt), truth)
        assert steps["suffix"] < 0.95 * steps["usual"]
        assert steps["suffix"] <= steps["eager"]


def test_a_longer_match_outweighs_a_frequent_shorter_one() -> None:
    """Where prompt lookup of a few tokens is misled by the latest occurrence."""
    far, near = list(range(100, 110)), [108, 109]
    prompt = [*far, 1, 50, *near, 2, 51, *near, 2, 52, *far]
    assert list(propose(suffix(4), request("a", prompt)).tree.tokens[:3]) == [109, 1, 50]
    assert propose(NgramDrafter(4, 1, 2, select_index()), request("a", prompt)).tree.tokens[1] == 2


def test_a_tree_holds_both_continuations_the_likelier_first() -> None:
    draft = propose(suffix(), request("a", [1, 2, 3, 9, 1, 2, 3, 8, 1, 2, 4, 7, 1, 2]))
    first = [draft.tree.tokens[node] for node in draft.tree.children(ROOT)]
    assert first == [3, 4]
    three = draft.tree.child_with(ROOT, 3)
    assert three is not None
    assert {draft.tree.tokens[node] for node in draft.tree.children(three)} == {9, 8}


def test_survival_is_the_log_chance_of_the_path() -> None:
    drafter = suffix()
    wanted = request("a", quoting(3)[0])
    draft = propose(drafter, wanted)
    assert len(draft.survival) == len(draft.tree) > 3
    for node in range(1, len(draft.tree)):
        assert math.log(0.03) <= draft.survival[node] <= draft.survival[draft.tree.parents[node]] <= 0.0


def test_budgets_are_kept() -> None:
    drafter, wanted = suffix(40), request("a", [1, 2, 3, 4] * 30)
    for max_nodes in (1, 2, 7, 41):
        assert len(propose(drafter, wanted, max_nodes).tree) == max_nodes


def ended(drafter: SuffixDrafter, name: str, prompt: Sequence[int], output: Sequence[int], reason: str | None) -> None:
    one = request(name, prompt)
    drafter.begin(one)
    one.token_ids.extend(output)
    one.finish_reason = reason  # type: ignore[assignment]
    drafter.end(name)


def test_requests_draft_from_answers_before_them() -> None:
    drafter = suffix()
    output = list(range(50, 80))
    ended(drafter, "old", [7, 7, 7], output, "stop")
    draft = propose(drafter, request("new", [1, 2, *output[:5]]))
    assert draft.tree.path_tokens(len(draft.tree) - 1) == output[5 : 4 + len(draft.tree)]


@pytest.mark.parametrize("reason", [None, "stop"])
def test_only_answers_of_ended_requests_are_kept(reason: str | None) -> None:
    drafter = suffix()
    ended(drafter, "old", [60, 61, 62, 63], [70, 71, 72, 73], reason)
    assert len(propose(drafter, request("prompt", [60, 61])).tree) == 1, "prompts are not kept"
    assert (len(propose(drafter, request("answer", [70, 71])).tree) > 1) == (reason is not None)


def test_nothing_is_kept_where_the_corpus_is_off() -> None:
    drafter = suffix(corpus_tokens=0)
    ended(drafter, "old", [1], [70, 71, 72, 73], "stop")
    assert len(propose(drafter, request("new", [70, 71])).tree) == 1


def test_a_preempted_request_goes_on() -> None:
    drafter, wanted = suffix(), request("a", [1, 2, 3, 4, 5, 1, 2])
    drafter.begin(wanted)
    before = propose(drafter, wanted)
    drafter.end("a")
    again = propose(drafter, wanted)
    assert list(again.tree.tokens) == list(before.tree.tokens)
    assert before.num_caught_up == 0 and propose(drafter, wanted).num_caught_up == 0
    drafter.end("a")
    assert propose(suffix(3), wanted).num_caught_up == 7


class Recorded(SuffixDrafter):
    """Remembers what it proposed."""

    def propose(self, drafts: Sequence[Draft]) -> None:
        super().propose(drafts)
        self.trees = [*getattr(self, "trees", []), *(list(draft.tree.tokens) for draft in drafts)]


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_texts_are_plain_decodings_on_either_implementation(temperature: float) -> None:
    """The same drafts too, whichever implementation is installed."""
    params = [SamplingParams(seed=i, max_tokens=16, temperature=temperature) for i in range(3)]
    groups = [harness.request(i, [t % 24 for t in quoting(i)[0][:20]], each) for i, each in enumerate(params)]
    plain = harness.plain(groups)
    drafters = [Recorded(9, kit, least_chance=0.01) for kit in (select_suffix(), reference_suffix())]
    for drafter in drafters:
        made = harness.with_drafter(harness.engine("none", max_num_batched_tokens=15), drafter)
        assert harness.run(made, [harness.fresh(group) for group in groups]) == plain
    assert drafters[0].trees == drafters[1].trees
    assert any(len(tree) > 1 for tree in drafters[0].trees)


def deterministic_draft() -> Draft:
    """An uneven tree over tokens 0 .. 2 with several children a node, not added in their parents' order."""
    draft = Draft(request("a", [0]), 9)
    one = draft.add(ROOT, 1, -0.1)
    two = draft.add(one, 2, -0.2)
    zero = draft.add(ROOT, 0, -0.3)
    for parent, token in ((two, 0), (one, 0), (zero, 2), (zero, 1), (ROOT, 2)):
        draft.add(parent, token, -1.0)
    assert len(draft.survival) == len(draft.tree) == 9
    return draft


@pytest.mark.parametrize("seed", range(3))
def test_several_certain_children_are_verified_exactly(seed: int) -> None:
    """The rejection rule on a tree drafted without randomness: every outcome enumerated, the law is the target's."""
    p, tree, length = table(seed, 4, sharpness=1.5), deterministic_draft().tree, 4
    law: dict[tuple[int, ...], float] = defaultdict(float)
    drawn = []

    def run(coins: Coins) -> None:
        def draw(left, node: int) -> int:  # type: ignore[no-untyped-def]
            drawn.append((tuple(tree.path_tokens(node)), left / left.sum()))
            return -1

        verify.verify_tree(tree, lambda node: p[tuple(tree.path_tokens(node))], coins.accept, draw)

    for coins in branches(run):
        accepted, weights = drawn.pop()
        for token in range(3):
            spread((*accepted, token), coins.chance * float(weights[token]), p, length, law)
    assert largest_difference(law, target_law(p, length)) < 1e-12


# -- predictions ------------------------------------------------------------------------------------------------


def edited(seed: int, length: int = 300, share: float = 0.05) -> tuple[list[int], list[int]]:
    """A text, and the same with some tokens replaced, dropped or inserted."""
    rng = random.Random(seed)
    before = [rng.randrange(400) for _ in range(length)]
    after: list[int] = []
    for token in before:
        kind = rng.random() / share
        after += [rng.randrange(400)] if kind < 1 / 3 else [] if kind < 2 / 3 else [token]
        after += [rng.randrange(400)] if 2 / 3 <= kind < 1 else []
    return before, after


def test_copies_what_the_answer_is_expected_to_repeat() -> None:
    """One step for 12 tokens and one for each change, not more than one besides."""
    for seed in range(3):
        before, after = edited(seed)
        changes = sum(a != b for a, b in zip(before, after, strict=False))
        assert changes > 5
        expected, plain = request("a", range(500, 540)), request("b", range(500, 540))
        expected.prediction = tuple(before)
        without = answer(suffix(), plain, after)
        assert answer(suffix(), expected, after) < 75 < 250 < without, seed


def test_the_first_draft_is_the_beginning_of_the_prediction() -> None:
    wanted, drafter = request("a", range(50)), suffix()
    wanted.prediction = (101, 102, 103, 104, 105)
    drafter.begin(wanted)
    assert propose(drafter, wanted).tree.tokens[1:6] == [101, 102, 103, 104, 105]


def test_a_preempted_request_still_knows_its_prediction() -> None:
    wanted, drafter = request("a", range(50)), suffix()
    wanted.prediction = tuple(range(100, 120))
    drafter.begin(wanted)
    wanted.token_ids += [100, 101]
    drafter.end(wanted.request_id)
    assert propose(drafter, wanted).tree.tokens[1:4] == [102, 103, 104]


def test_predictions_change_no_token() -> None:
    """Right or wrong, of any request in a batch."""
    params = [SamplingParams(max_tokens=40, temperature=t, seed=5, ignore_eos=True) for t in (0.0, 1.0)]
    prompts = ["Once upon a time", "The old man said"]
    truth = mini.plain().generate(prompts, params)
    said = [output.outputs[0].text for output in truth]
    llm = mini.plain().with_drafter("suffix", across_requests=False, adaptive=False)
    for predictions in (said, said[::-1], [said[0], None], ["", "something else"]):
        again = llm.generate(prompts, params, prediction=predictions)
        assert [o.outputs[0].token_ids for o in again] == [o.outputs[0].token_ids for o in truth]
    right, none = llm.generate(prompts, params, prediction=said), llm.generate(prompts, params)
    steps = [[output.outputs[0].stats.num_steps for output in outputs] for outputs in (right, none)]
    assert sum(steps[0]) < 0.6 * sum(steps[1])


def test_a_prediction_that_nobody_reads_is_refused() -> None:
    with pytest.raises(ConfigError, match="read by the drafter suffix alone, and this engine has none"):
        mini.plain().generate("a", prediction="b")


def test_a_prediction_is_cut_to_what_can_be_repeated() -> None:
    llm = mini.plain().with_drafter("suffix", max_model_len=64)
    assert len(llm.predicted("a b c " * 10_000)) == 64
    assert llm.predicted("") == ()


def test_answers_help_requests_of_the_same_salt_and_adapter_alone() -> None:
    drafter, one = suffix(4, least_chance=0.2), SomeAdapter()
    kinds: list[dict[str, Any]] = [{}, {"cache_salt": "a"}, {"cache_salt": "b"}, {"adapter": one}]
    kinds += [{"adapter": one, "cache_salt": "a"}]

    def of(name: str, prompt: list[int], kind: dict[str, Any]) -> Request:
        return Request(name, tuple(prompt), SamplingParams(max_tokens=100), seed=0, max_len=1000, **kind)

    for index, kind in enumerate(kinds):
        said = of(str(index), [1], kind)
        drafter.begin(said)
        said.token_ids += [7, 8, 100 + index, 9]
        said.finish_reason = "stop"
        drafter.end(said.request_id)
    for index, kind in enumerate(kinds):
        asking = of("asking", [2, 7, 8], kind)
        drafter.begin(asking)
        assert propose(drafter, asking).tree.tokens[1] == 100 + index
        drafter.end("asking")
    stranger = of("stranger", [2, 7, 8], {"cache_salt": "c"})
    drafter.begin(stranger)
    assert len(propose(drafter, stranger).tree) == 1


class SomeAdapter:
    """Adapters are told apart as objects."""
