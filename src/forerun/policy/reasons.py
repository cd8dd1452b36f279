"""Why a request would have no drafts now, in words for users.

Knows: what a policy believes. Does not know: how it decides.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from forerun.core import Request
from forerun.policy.acceptance import is_promised
from forerun.speculation.draft import Draft

if TYPE_CHECKING:
    from forerun.policy.policy import AdaptivePolicy


def why_plain(policy: AdaptivePolicy, request: Request) -> str | None:
    """No member's drafts are right often enough for what they cost: how often they are, member by member."""
    if not policy.exploration.may_draft and not is_promised(request, policy.readers, in_debt=True):
        return "drafts have cost more than they gained lately; they go on once 1% of the time has paid for that"
    draft, members = Draft(request, policy.max_nodes), sorted(policy.costs.calls)
    if any(policy.wants(member, draft) for member in members):
        return None
    return "; ".join(_missing(policy, request, member) for member in members) or None


def _missing(policy: AdaptivePolicy, request: Request, member: str) -> str:
    rate, reading_s = policy.acceptance_of(request).rates(request, member)[0], policy.reading_s(member, request)
    reads = f", and what {member} has to read first takes {1e3 * reading_s:.0f} ms" if reading_s > 0.0 else ""
    return f"drafts of {member} are right {rate:.0%} of the time, too seldom for what they cost here{reads}"
