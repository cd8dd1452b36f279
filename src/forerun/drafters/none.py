"""Plain decoding: the drafter that proposes nothing."""

from __future__ import annotations

from collections.abc import Sequence

from forerun.drafters.base import Drafter, DrafterContext, DrafterSpec, Stateless
from forerun.speculation.draft import Draft


def build(context: DrafterContext) -> Drafter:
    """The drafter that needs nothing."""
    return NoDrafter()


SPEC = DrafterSpec(name="none", build=build, help="nothing: plain decoding", max_draft_tokens=0)


class NoDrafter(Stateless):
    """Leaves every root alone, so that plain decoding is the same code with another drafter."""

    name = SPEC.name
    max_nodes = 1

    def propose(self, drafts: Sequence[Draft]) -> None:
        """Nothing to propose."""
