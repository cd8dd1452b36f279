"""All acceptance rules; nothing else decides what a user reads.

Knows: draft trees and, per node, the target's distribution. Does not know: models, caches, how drafts were made.

*coupled*: the token after a node is the target's own choice argmax(log p + G(seed, position)), and G does not depend
on the drafts; the walk follows those choices as far as the tree goes. The output is a function of the target, the
prompt and the seed alone. Where only the temperature matters kernels walk by the same rule (`Kernels.walk_trees`).

*rejection*: drafts are accepted or replaced so that the output has the target's distribution, whatever q was.
  token      Leviathan et al., arXiv 2211.17192, algorithm 1            (chains)
  block      Sun et al., arXiv 2403.10444, algorithm 2                  (chains)
  recursive  recursive rejection without replacement, arXiv 2402.14160  (trees; Sequoia, arXiv 2402.12374)
Letters: p target, q draft, r joint acceptance so far, gamma drafted tokens. One-hot q (drafts chosen without
randomness) is a drafted distribution like any other: accept x with p(x), else zero it and renormalise.

A target whose distribution after a drafted node is unusable raises LogitsError. The step then ends one node early, with
that node's token as its last: the next step meets the error at its root, where plain decoding meets it.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import NamedTuple

import torch
from torch import Tensor

from forerun.errors import LogitsError
from forerun.speculation.tree import ROOT, DraftTree


class Choice(NamedTuple):
    """What one step decided for one request."""

    nodes: tuple[int, ...]  # accepted nodes, the root first
    token: int  # the recovered token, or the bonus token where every draft on the path was accepted


TargetDistribution = Callable[[int], Tensor]  # node -> p after that node, [vocab_size] float64; raises LogitsError
Uniform = Callable[[int, int], float]  # (node, index) -> a uniform number in (0, 1) of this step's own
Draw = Callable[[Tensor, int], int]  # (unnormalised distribution, node) -> a token drawn from it
Rule = Callable[[DraftTree, TargetDistribution, Uniform, Draw], Choice]


class CoupledWalk:
    """The coupled rule: follow the target's own choices down the tree until a choice has no node."""

    __slots__ = ("_tree", "_verified", "nodes")

    def __init__(self, tree: DraftTree, verified: Container[int]) -> None:
        """`verified`: the nodes whose logits were computed; the others count as not drafted."""
        self._tree = tree
        self._verified = verified
        self.nodes = [ROOT]

    def advance(self, token: int) -> Choice | None:
        """The target chose `token` after the last node: the outcome, or None if the walk goes on below it."""
        child = self._tree.child_with(self.nodes[-1], token)
        if child is None or child not in self._verified:
            return Choice(tuple(self.nodes), token)
        self.nodes.append(child)
        return None


def verify_tree(tree: DraftTree, target: TargetDistribution, accept: Uniform, draw: Draw) -> Choice:
    """Recursive rejection without replacement: at every node try the children in draw order, then recover."""
    nodes, p = [ROOT], target(ROOT)
    while True:
        node = nodes[-1]
        accepted, residual = _try_children(tree, node, p, accept)
        if accepted is None:
            return Choice(tuple(nodes), draw(residual, node))
        below = _below(target, accepted)
        if below is None:
            return Choice(tuple(nodes), tree.tokens[accepted])
        nodes.append(accepted)
        p = below


def _below(target: TargetDistribution, node: int) -> Tensor | None:
    """p after a drafted node; None where it is unusable."""
    try:
        return target(node)
    except LogitsError:
        return None


def _try_children(tree: DraftTree, node: int, p: Tensor, accept: Uniform) -> tuple[int | None, Tensor]:
    """The child accepted at `node`, or None and what is left of p."""
    q = tree.proposal(node)
    for index, child in enumerate(tree.children(node)):
        token = tree.tokens[child]
        q_token = 1.0 if q is None else float(q[token])
        if accept(node, index) * q_token < float(p[token]):  # never what p excludes, however small q is
            return child, p
        p = residual(p, _one_hot(token, p) if q is None else q)
        q = None if q is None else _without(q, token)
    return None, p


def verify_chain_token(tree: DraftTree, target: TargetDistribution, accept: Uniform, draw: Draw) -> Choice:
    """The token rule on a chain: it is the recursive rule with one child a node."""
    assert tree.is_chain
    return verify_tree(tree, target, accept, draw)


def verify_chain_block(tree: DraftTree, target: TargetDistribution, accept: Uniform, draw: Draw) -> Choice:
    """Block verification on a chain: the longest prefix whose own test passes, where tests use joint ratios.

    r_i = min(1, r_{i-1} p/q);  S_i = sum (r_i p - q)+;  h_i = S_i / (S_i + 1 - r_i), h_gamma = r_gamma.
    """
    assert tree.is_chain
    gamma = len(tree) - 1
    p = target(ROOT)
    r, best, best_p, best_residual = 1.0, ROOT, p, _block_residual(1.0, p, tree, ROOT)
    for node in range(1, gamma + 1):
        r = min(1.0, r * _ratio(tree, p, node))
        if r == 0.0:  # no test below can pass
            break
        below = _below(target, node)
        if below is None or node == gamma:  # the chain ends here, whatever was drafted below
            if accept(node, 0) < r:
                last = tuple(range(node + (below is not None)))
                return Choice(last, tree.tokens[node] if below is None else draw(below, node))
            break
        p, left = below, _block_residual(r, below, tree, node)
        if accept(node, 0) < _block_threshold(float(left.sum()), r):
            best, best_p, best_residual = node, p, left
    has_mass = float(best_residual.sum()) > 0.0  # rounding may leave nothing; then p equals q
    return Choice(tuple(range(best + 1)), draw(best_residual if has_mass else best_p, best))


def _ratio(tree: DraftTree, p: Tensor, node: int) -> float:
    """p(x) / q(x) of a chain's node after its parent."""
    q = tree.proposal(node - 1)
    token = tree.tokens[node]
    return float(p[token]) / (1.0 if q is None else float(q[token]))


def _block_residual(r: float, p: Tensor, tree: DraftTree, node: int) -> Tensor:
    """(r p - q)+ after `node`, unnormalised; p itself where nothing was drafted."""
    children = tree.children(node)
    if not children:
        return p
    q = tree.proposal(node)
    return torch.clamp(r * p - (_one_hot(tree.tokens[children[0]], p) if q is None else q), min=0.0)


def _block_threshold(mass: float, r: float) -> float:
    denominator = mass + 1.0 - r
    return mass / denominator if denominator > 0.0 else 1.0


def residual(p: Tensor, q: Tensor) -> Tensor:
    """norm((p - q)+); p itself where that has no mass, which happens only when p equals q up to rounding."""
    left = torch.clamp(p - q, min=0.0)
    mass = float(left.sum())
    return left / mass if mass > 0.0 else p


def _one_hot(token: int, like: Tensor) -> Tensor:
    one_hot = torch.zeros_like(like)
    one_hot[token] = 1.0
    return one_hot


def _without(q: Tensor, token: int) -> Tensor:
    """q with one token removed, renormalised; all zero when nothing is left."""
    rest = q.clone()
    rest[token] = 0.0
    mass = float(rest.sum())
    return rest / mass if mass > 0.0 else rest
