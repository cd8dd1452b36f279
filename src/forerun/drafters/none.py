"""Plain decoding: the drafter that proposes nothing."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from forerun.core import Request
from forerun.drafters.base import Observed
from forerun.models.base import LayerSpec
from forerun.speculation.growth import Draft


class NoDrafter:
    """Leaves every root alone, so that plain decoding is the same code with another drafter."""

    name = "none"
    max_nodes = 1
    hidden_layers: tuple[int, ...] = ()
    kv_specs: tuple[LayerSpec, ...] = ()
    weight_bytes = 0

    def begin(self, request: Request) -> None:
        """Nothing to prepare."""

    def observe(self, observed: Sequence[Observed], hidden: dict[int, Tensor]) -> None:
        """Nothing to learn."""

    def propose(self, drafts: Sequence[Draft]) -> None:
        """Nothing to propose."""

    def end(self, request_id: str) -> None:
        """Nothing to forget."""
