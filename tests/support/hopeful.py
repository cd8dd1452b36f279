"""The adaptive policy as it is on a GPU, sure of its drafter: so that many drafts are asked for, in tests of what then
happens to them.

Knows: what a policy learns from. Does not know: devices, models.
"""

from __future__ import annotations

from forerun.core import Request, SamplingParams
from forerun.drafters.portfolio import Portfolio
from forerun.engine.engine import Engine
from forerun.policy.costs import CallCosts, Costs, PassCosts
from forerun.policy.exploration import Exploration
from forerun.policy.policy import AdaptivePolicy
from forerun.speculation.draft import Draft


def expect_much(made: Engine, looks_at_drafts: bool = False) -> AdaptivePolicy:
    """Give an engine a policy to which rows and calls cost nearly nothing, and which has seen its drafters be right.

    A plain step takes 1e6 seconds, beside which what is measured now counts for nothing on the busiest machine; none is
    made to measure it.
    """
    assert isinstance(made.drafter, Portfolio)
    costs = Costs(PassCosts({1: 1e6, 256: 1e6 + 1}))
    policy = AdaptivePolicy(made.drafter.max_nodes, costs, may_prune=True, looks_at_drafts=looks_at_drafts)
    for member in made.drafter.members:
        costs.calls[member.name] = CallCosts(draws_levels=member.drafter.weight_bytes > 0)
        if member.drafter.weight_bytes:
            for size in (1, 2, 4, 8, 16):
                costs.calls[member.name].expect(size, size, 1e-6)
        show_right(policy, member.name, made.drafter.max_nodes - 1)
    costs.learn_step(1, drafts=False, seconds=1e6)
    policy.exploration = Exploration(_until_plain=10**9)
    made.policy = policy
    return policy


def show_right(policy: AdaptivePolicy, member: str, num_drafts: int, right: int | None = None) -> None:
    """Chains of a request that is over were right to their end, or so far."""
    tokens = list(range(2, 2 + num_drafts))
    request = Request("before", (1,), SamplingParams(), seed=0)
    for _ in range(200):
        draft = Draft(request, num_drafts + 1, member=member)
        draft.add_chain(tokens)
        policy.acceptance.learn(request, draft.proposal_of(member), [*tokens[:right], 1])
