"""torch computes on one thread while a step runs on the kernels' threads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.support import mini

from forerun import SamplingParams
from forerun.kernels.threads import single_torch_thread


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_torch_has_one_thread_meanwhile_and_its_own_again_even_after_an_error() -> None:
    with single_torch_thread():
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 2
    with pytest.raises(ValueError, match="broken"), single_torch_thread():
        raise ValueError("broken")
    assert torch.get_num_threads() == 2


def test_a_step_that_computes_on_the_kernels_threads() -> None:
    llm = mini.plain().with_drafter("none")
    inner, seen = llm.engine.verifier, []

    class Watched:
        reads_pending = staticmethod(inner.reads_pending)

        def verify(self, *given: Any) -> Any:
            seen.append(torch.get_num_threads())
            return inner.verify(*given)

    llm.engine.verifier = Watched()
    llm.generate(["One", "Two"], SamplingParams(max_tokens=4))
    is_native = llm.kernels.name.startswith("cpu")
    assert set(seen) == {1 if is_native else 2} and torch.get_num_threads() == 2
