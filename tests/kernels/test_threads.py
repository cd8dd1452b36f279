"""torch computes on one thread while a step runs on the kernels' threads."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.models import factory
from tests.support import mini

from forerun import LLM, SamplingParams, assemble
from forerun.kernels import threads
from forerun.kernels.threads import single_torch_thread


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def hybrid(folder: Path) -> LLM:
    """Whose passes are not replayed."""
    model_type, fields = factory.CASES["qwen3.5"]
    factory.save_checkpoint(factory.random_hf_model(model_type, fields), folder)
    return LLM(str(folder), drafter="none")


def test_torch_has_one_thread_meanwhile_and_its_own_again_even_after_an_error() -> None:
    with single_torch_thread():
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 2
    with pytest.raises(ValueError, match="broken"), single_torch_thread():
        raise ValueError("broken")
    assert torch.get_num_threads() == 2


def in_new_thread() -> int:
    """torch's number of threads for one that has not called torch before."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(torch.get_num_threads).result()


def test_threads_that_begin_meanwhile_have_their_own_number() -> None:
    if threads._setters()[0] is torch.set_num_threads:
        pytest.skip("torch is built without OpenMP")
    assert in_new_thread() == 2
    with single_torch_thread():
        assert torch.get_num_threads() == 1 and in_new_thread() == 2
    assert in_new_thread() == torch.get_num_threads() == 2


def test_torch_without_openmp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "_setters", lambda: (torch.set_num_threads, threads._nothing))
    with single_torch_thread():
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 2


def test_passes_and_calls_are_measured_as_steps_run_them(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    for name, inner in (("measure_passes", assemble.measure_passes), ("measure_calls", assemble.measure_calls)):

        def watched(*given: Any, inner: Any = inner) -> Any:
            seen.append(torch.get_num_threads())
            return inner(*given)

        monkeypatch.setattr(assemble, name, watched)
    llm = LLM("mini", drafter="ngram", keep_learned=False)
    assert seen == [1 if llm.kernels.name.startswith("cpu") else 2] * 2 and torch.get_num_threads() == 2


@pytest.mark.parametrize("name", ["mini", "qwen3.5"])
def test_a_step_that_computes_on_the_kernels_threads(name: str, tmp_path: Path) -> None:
    llm = mini.plain().with_drafter("none") if name == "mini" else hybrid(tmp_path)
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
    assert llm.engine.runner.replays == (is_native and name == "mini")
