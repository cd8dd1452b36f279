"""Steps of an adaptive policy with a made-up drafter of chains: who was asked for how much, and what came of it.

Knows: the order in which engine and portfolio call a policy. Does not know: models, schedulers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from forerun.core import Request
from forerun.engine.policy_adaptive import AdaptivePolicy
from forerun.speculation.draft import Draft

MEMBER = "m"


@dataclass(frozen=True, slots=True)
class Prices:
    """Seconds the made-up machine really takes."""

    row_s: float = 0.01
    pass_s: float = 1.0
    draft_s: float = 0.05
    read_s: float = 0.0  # a token that was missed

    def verify_s(self, num_rows: int) -> float:
        """A pass over so many rows."""
        return self.pass_s + self.row_s * num_rows


@dataclass(frozen=True, slots=True)
class Step:
    """What happened in one."""

    drafted: Mapping[str, int]
    verified: Mapping[str, int]
    num_tokens: int
    seconds: float


def step(policy: AdaptivePolicy, requests: Sequence[Request], right: Mapping[str, int], prices: Prices) -> Step:
    """Requests choose tokens; of the next drafts of each the first `right` (by id) would be right."""
    policy.begin_step(len(requests))
    drafts = [Draft(r, budget) for r in requests if (budget := policy.node_budget(r)) > 1]
    drafting_s, drafted = _ask(policy, drafts, right, prices)
    policy.admit(drafts, len(requests))
    sizes = {draft.request.request_id: draft.num_nodes - 1 for draft in drafts}
    tokens = 0
    for request in requests:
        verified, hits = sizes.get(request.request_id, 0), right[request.request_id]
        accepted = min(verified, hits)
        tokens += accepted + 1
        policy.learn(request, verified, accepted + (accepted < verified), accepted)
    for draft in drafts:
        hits = right[draft.request.request_id]
        policy.learn_proposals(draft, [*range(2, 2 + hits), 1][: draft.num_nodes])
    rows = len(requests) + sum(sizes.values())
    policy.learn_step_cost(rows, prices.verify_s(rows), 0.0)
    return Step(drafted, sizes, tokens, prices.verify_s(rows) + drafting_s)


def draw(own: Draft, num_right: int) -> None:
    """A chain of a drafter that knows how sure it is, and stops where that is too little for another level."""
    survival = 0.0
    while own.num_free and math.exp(survival) >= own.least:
        depth = len(own.tree)
        survival += math.log(0.9 if depth <= num_right else 0.1)
        own.add(depth - 1, 1 + depth, survival, MEMBER)


def _ask(
    policy: AdaptivePolicy, drafts: Sequence[Draft], right: Mapping[str, int], prices: Prices
) -> tuple[float, dict[str, int]]:
    """As a portfolio of one member does -> seconds, drafts by request."""
    quotas, least = policy.quotas(MEMBER, drafts) if drafts else [], policy.least_chance(MEMBER)
    wanted = [(draft, quota - 1) for draft, quota in zip(drafts, quotas, strict=True) if quota > 1]
    seconds = 0.0
    for draft, num in wanted:
        draft.ask(num, least, may_be_pending=False)
        lag = len(draft.request.token_ids) - policy._read.get((draft.request.request_id, MEMBER), 0)
        draft.num_caught_up = lag if lag > 1 else 0
        draw(draft, right[draft.request.request_id])
        seconds += prices.read_s * draft.num_caught_up
        proposal = draft.proposal_of(MEMBER)
        draft.believe(proposal, policy.log_survival(proposal, draft))
    asked = [draft for draft, _ in wanted]
    if asked:
        seconds += prices.draft_s * max(draft.num_own for draft in asked)
        policy.learn_member_cost(MEMBER, seconds, asked)
    return seconds, {draft.request.request_id: draft.num_own for draft in asked}
