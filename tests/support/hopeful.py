"""The adaptive policy as it is on a card, sure of its drafter: so that many drafts are asked for, in tests of what then
happens to them.

Knows: what a policy learns from. Does not know: devices, models.
"""

from __future__ import annotations

from forerun.core import Request, SamplingParams
from forerun.drafters.portfolio import Portfolio
from forerun.engine.engine import Engine
from forerun.engine.policy import StepCosts, VerifyCost
from forerun.engine.policy_adaptive import AdaptivePolicy
from forerun.speculation.draft import Draft


def expect_much(made: Engine, prunes: bool = False) -> AdaptivePolicy:
    """Give an engine a policy to which rows and calls cost nearly nothing, and which has seen its drafters be right."""
    assert isinstance(made.drafter, Portfolio)
    costs = StepCosts(VerifyCost({1: 1.0, 256: 1.0001}))
    policy = AdaptivePolicy(made.drafter.max_nodes, costs, may_prune=True, prunes=prunes)
    for member in made.drafter.members:
        if member.weight_bytes:
            policy.expect(member.name, dict.fromkeys((1, 2, 4, 8, 16), 1e-6))
        _show_right(policy, member.name, made.drafter.max_nodes - 1)
    show_plain_steps(policy, 1.0)
    made.policy = made.drafter.guide = policy
    return policy


def show_plain_steps(policy: AdaptivePolicy, pass_s: float, num_requests: int = 1) -> None:
    """As many steps without drafts as a policy wants to see before it lets anybody draft."""
    for _ in range(4):
        policy.begin_step(num_requests)
        policy.learn_step_cost(num_requests, pass_s, 0.0)


def _show_right(policy: AdaptivePolicy, member: str, num_drafts: int) -> None:
    """Chains of a request that is over were right to their end."""
    tokens = list(range(2, 2 + num_drafts))
    for _ in range(30):
        draft = Draft(Request("before", (1,), SamplingParams(), seed=0), num_drafts + 1)
        draft.add_chain(tokens, member)
        policy.calibration.learn("before", draft.proposal_of(member), [*tokens, 1])
    policy.calibration.forget("before")
