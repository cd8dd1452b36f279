"""The acceptance rules preserve the target's distribution: every outcome enumerated, no sampling."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator
from random import Random

import pytest
import torch
from torch import Tensor

from forerun.errors import LogitsError
from forerun.speculation import verify
from forerun.speculation.tree import ROOT, DraftTree

V = 3
Text = tuple[int, ...]


class Coins:
    """Plays one branch of a run: comparisons with a uniform number come out as scripted, their chances recorded."""

    def __init__(self, script: list[bool]) -> None:
        self.script = script
        self.used: list[bool] = []
        self.chance = 1.0

    def decide(self, threshold: float) -> bool:
        threshold = min(1.0, max(0.0, threshold))
        outcome = self.script[len(self.used)] if len(self.used) < len(self.script) else True
        self.used.append(outcome)
        self.chance *= threshold if outcome else 1.0 - threshold
        return outcome

    def accept(self, node: int, index: int) -> Coin:
        return Coin(self)


class Coin:
    """Stands for u in `u < h` and `u * q < p`."""

    def __init__(self, coins: Coins, factor: float = 1.0) -> None:
        self.coins = coins
        self.factor = factor

    def __mul__(self, factor: float) -> Coin:
        return Coin(self.coins, self.factor * factor)

    def __lt__(self, bound: float) -> bool:
        return self.coins.decide(bound / self.factor)


def branches(run: Callable[[Coins], None]) -> Iterator[Coins]:
    """Every combination of coin outcomes a run can meet."""
    pending: list[list[bool]] = [[]]
    while pending:
        script = pending.pop()
        coins = Coins(script)
        run(coins)
        yield coins
        for i in range(len(script), len(coins.used)):
            pending.append([*coins.used[:i], False])


def table(seed: int, depth: int, sharpness: float = 1.0) -> dict[Text, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    prefixes = [p for d in range(depth + 1) for p in itertools.product(range(V), repeat=d)]
    return {p: torch.softmax(sharpness * torch.randn(V, generator=generator, dtype=torch.float64), 0) for p in prefixes}


def without_replacement(q: Tensor, width: int) -> Iterator[tuple[Text, float]]:
    for order in itertools.permutations(range(V), width):
        chance, left = 1.0, 1.0
        for token in order:
            chance *= float(q[token]) / left if left > 1e-15 else 0.0
            left -= float(q[token])
        if chance > 0:
            yield order, chance


def grow_all(q: dict[Text, Tensor], widths: tuple[int, ...], random: bool) -> Iterator[tuple[DraftTree, float]]:
    """Every tree the drafter can draw, with its chance."""

    def rebuild(choices: list[Text]) -> DraftTree:
        fresh, frontier, index = DraftTree(0), [ROOT], 0
        for _ in widths:
            new = []
            for node in frontier:
                prefix = tuple(fresh.path_tokens(node))
                new += fresh.draw_children(node, choices[index], q[prefix] if random else None, "t")
                index += 1
            frontier = new
        return fresh

    def walk(
        choices: list[Text], prefixes: list[Text], depth: int, chance: float
    ) -> Iterator[tuple[list[Text], float]]:
        if depth == len(widths):
            yield choices, chance
            return
        options = [
            list(without_replacement(q[p], widths[depth])) if random else [(tuple(range(widths[depth])), 1.0)]
            for p in prefixes
        ]
        for combo in itertools.product(*options):
            level = [tokens for tokens, _ in combo]
            c = chance
            for _, step in combo:
                c *= step
            below = [(*p, t) for p, tokens in zip(prefixes, level, strict=True) for t in tokens]
            yield from walk(choices + level, below, depth + 1, c)

    for choices, chance in walk([], [()], 0, 1.0):
        yield rebuild(choices), chance


def law_of(
    rule, p: dict[Text, Tensor], q: dict[Text, Tensor], widths: tuple[int, ...], random: bool,
    unusable: frozenset[Text] = frozenset(),
) -> dict[Text, float]:  # type: ignore[no-untyped-def]  # fmt: skip
    """The exact law of the first len(widths)+1 tokens when the rule's output is continued by plain decoding.

    `unusable`: prefixes after which the rule is not told p, as if the logits were NaN or a mask late.
    """
    length = len(widths) + 1
    law: dict[Text, float] = defaultdict(float)
    for tree, drawn in grow_all(q, widths, random):
        last: list[tuple[tuple[int, ...], Tensor]] = []

        def run(coins: Coins, tree: DraftTree = tree, last: list[tuple[tuple[int, ...], Tensor]] = last) -> None:
            def target(node: int) -> Tensor:
                prefix = tuple(tree.path_tokens(node))
                if prefix in unusable:
                    raise LogitsError("no distribution")
                return p[prefix]

            def draw(left: Tensor, node: int) -> int:
                last.append((tuple(tree.path_tokens(node)), left / left.sum()))
                return -1

            choice = rule(tree, target, coins.accept, draw)
            if choice.token >= 0:  # it ended with a draft
                only = torch.nn.functional.one_hot(torch.tensor(choice.token), V).double()
                last.append((tuple(tree.path_tokens(choice.nodes[-1])), only))

        for coins in branches(run):
            accepted, weights = last.pop()
            if coins.chance == 0.0:
                continue
            for token in range(V):
                spread((*accepted, token), drawn * coins.chance * float(weights[token]), p, length, law)
    return law


def spread(text: Text, mass: float, p: dict[Text, Tensor], length: int, law: dict[Text, float]) -> None:
    if mass == 0.0:
        return
    if len(text) == length:
        law[text] += mass
        return
    for token in range(V):
        spread((*text, token), mass * float(p[text][token]), p, length, law)


def target_law(p: dict[Text, Tensor], length: int) -> dict[Text, float]:
    law: dict[Text, float] = defaultdict(float)
    spread((), 1.0, p, length, law)
    return law


def largest_difference(a: dict[Text, float], b: dict[Text, float]) -> float:
    return max(abs(a.get(k, 0.0) - b.get(k, 0.0)) for k in {*a, *b})


CASES = [
    ("token", verify.verify_chain_token, (1,)),
    ("token", verify.verify_chain_token, (1, 1)),
    ("token", verify.verify_chain_token, (1, 1, 1)),
    ("block", verify.verify_chain_block, (1,)),
    ("block", verify.verify_chain_block, (1, 1)),
    ("block", verify.verify_chain_block, (1, 1, 1)),
    ("recursive", verify.verify_tree, (2,)),
    ("recursive", verify.verify_tree, (3,)),
    ("recursive", verify.verify_tree, (2, 1)),
    ("recursive", verify.verify_tree, (2, 2)),
    ("recursive", verify.verify_tree, (1, 2)),
]


@pytest.mark.parametrize(("name", "rule", "widths"), CASES)
@pytest.mark.parametrize("random", [True, False])
@pytest.mark.parametrize("seed", [0, 1])
def test_output_law_is_the_targets(name, rule, widths, random, seed) -> None:  # type: ignore[no-untyped-def]
    p, q = table(seed, 4), table(seed + 100, 4, sharpness=2.0)
    law = law_of(rule, p, q, widths, random)
    assert largest_difference(law, target_law(p, len(widths) + 1)) < 1e-12


@pytest.mark.parametrize(("name", "rule", "widths"), CASES)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_law_holds_where_distributions_cannot_be_had(name, rule, widths, seed) -> None:  # type: ignore[no-untyped-def]
    """NaN, a grammar that fails, a mask that is late: below the root the step ends earlier, with the same law."""
    p, q = table(seed, 4), table(seed + 100, 4, sharpness=2.0)
    drafted = [prefix for prefix in p if prefix]
    unusable = frozenset(Random(seed).sample(drafted, len(drafted) // 2))
    law = law_of(rule, p, q, widths, True, unusable)
    assert largest_difference(law, target_law(p, len(widths) + 1)) < 1e-12
    with pytest.raises(LogitsError):
        law_of(rule, p, q, widths, True, frozenset({()}))


@pytest.mark.parametrize("rule", [verify.verify_chain_token, verify.verify_chain_block, verify.verify_tree])
def test_what_the_target_excludes_is_never_accepted(rule) -> None:  # type: ignore[no-untyped-def]
    """Not with the smallest of uniform numbers, nor where q has underflowed to zero, too."""
    tree, q = DraftTree(0), torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64)
    tree.draw_children(ROOT, (0, 1) if rule is verify.verify_tree else (0,), q, "t")
    only = torch.tensor([0.0, 0.0, 1.0], dtype=torch.float64)
    choice = rule(tree, lambda node: only, lambda node, index: 0.0, lambda left, node: int(left.argmax()))
    assert choice == verify.Choice((ROOT,), 2)


@pytest.mark.parametrize("rule", [verify.verify_chain_token, verify.verify_chain_block, verify.verify_tree])
def test_equal_draft_and_target(rule) -> None:  # type: ignore[no-untyped-def]
    p = table(3, 4)
    law = law_of(rule, p, p, (1, 1), True)
    assert largest_difference(law, target_law(p, 3)) < 1e-12


@pytest.mark.parametrize("rule", [verify.verify_chain_token, verify.verify_chain_block, verify.verify_tree])
def test_one_hot_target(rule) -> None:  # type: ignore[no-untyped-def]
    """Temperature 0: p is one-hot."""
    p = {k: torch.nn.functional.one_hot(v.argmax(), V).double() for k, v in table(4, 4).items()}
    law = law_of(rule, p, table(5, 4), (1, 1), True)
    assert largest_difference(law, target_law(p, 3)) < 1e-12


def accepted_mass(rule, p: dict[Text, Tensor], q: dict[Text, Tensor], widths: tuple[int, ...]) -> float:  # type: ignore[no-untyped-def]
    total = 0.0
    for tree, drawn in grow_all(q, widths, True):
        lengths: list[int] = []

        def run(coins: Coins, tree: DraftTree = tree, lengths: list[int] = lengths) -> None:
            choice = rule(tree, lambda n: p[tuple(tree.path_tokens(n))], coins.accept, lambda w, n: -1)
            lengths.append(len(choice.nodes) - 1)

        for coins in branches(run):
            total += drawn * coins.chance * lengths.pop()
    return total


@pytest.mark.parametrize("seed", range(4))
def test_block_accepts_at_least_as_much_as_token(seed: int) -> None:
    """arXiv 2403.10444, theorem 2."""
    p, q = table(seed, 4), table(seed + 50, 4, sharpness=1.5)
    block = accepted_mass(verify.verify_chain_block, p, q, (1, 1, 1))
    token = accepted_mass(verify.verify_chain_token, p, q, (1, 1, 1))
    assert block >= token - 1e-12


def test_token_rule_accepts_the_overlap() -> None:
    """One draft: the acceptance rate is sum min(p, q) (arXiv 2211.17192, eq. 4)."""
    p, q = table(7, 2), table(8, 2)
    overlap = float(torch.minimum(p[()], q[()]).sum())
    assert abs(accepted_mass(verify.verify_chain_token, p, q, (1,)) - overlap) < 1e-12


def test_the_enumeration_notices_a_wrong_rule() -> None:
    """Accepting with p instead of p/q is biased, and the enumeration sees it."""

    def wrong(tree: DraftTree, target, accept, draw):  # type: ignore[no-untyped-def]
        if accept(ROOT, 0) < float(target(ROOT)[tree.tokens[1]]):
            return verify.Choice((0, 1), draw(target(1), 1))
        return verify.Choice((0,), draw(target(ROOT), ROOT))

    p, q = table(0, 4), table(100, 4, sharpness=2.0)
    assert largest_difference(law_of(wrong, p, q, (1,), True), target_law(p, 2)) > 1e-3
