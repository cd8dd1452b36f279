"""Which storage formats exist, in the order they are tried.

Knows: the list. Does not know: how any of them works.
"""

from __future__ import annotations

from forerun.quant.base import TensorSource, WeightFormat
from forerun.quant.dense import DenseFormat

FORMATS: tuple[WeightFormat, ...] = (DenseFormat(),)


def find_format(source: TensorSource, prefix: str) -> WeightFormat | None:
    """The format in which the module `prefix` is stored, None if no tensors of it are there."""
    return next((form for form in FORMATS if form.matches(source, prefix)), None)
