"""What the parts of gpu.py share: sizes of a run, its due times, how work is timed, the models it runs.

Knows: a GPU and the rehearsal on a CPU, temporary folders. Does not know: what is measured, results, files kept.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, TypeVar

import torch

from forerun.bench.synthetic import RandomSource
from forerun.kernels.device import synchronize
from forerun.kernels.ops import Kernels
from forerun.kernels.triton.graphs import CudaCapture
from gpu_compile import FORMAT_ROWS, FORMATS, WIDTHS
from gpu_watch import Noted
from gpu_widen import WideningProcess

Seconds = Callable[[Sequence[Callable[[], object]], int], float]
Case = TypeVar("Case")


@dataclass(frozen=True, slots=True)
class BenchSizes:
    """How large a run is."""

    shapes: tuple[str, ...]  # names or folders with a config.json, small to large
    contexts: tuple[int, ...]  # known tokens before a pass
    hybrids: tuple[str, ...] = ()  # shapes with recurrent layers, whose passes are measured after the shortest of these
    rows: tuple[int, ...] = (1, 4, 8, 16, 32, 64)  # tokens of a pass
    compiled_rows: tuple[int, ...] = (1, 32, 64, 300)  # of each kind of kernel some
    tree_widths: tuple[int, ...] = WIDTHS  # of trees grown on the GPU
    weights: tuple[str, ...] = ("bf16", "int4")
    recurrent_rows: tuple[int, ...] = (1, 4, 16, 64, 512)  # of recurrent layers, of which trees have up to 64
    formats: tuple[str, ...] = FORMATS  # of single matrices
    format_rows: tuple[int, ...] = FORMAT_ROWS
    repeats: int = 7
    cold_bytes: int = 512 << 20  # matrices read in turn, so that no cache of a GPU keeps them
    copy_bytes: int = 2 << 30
    matmul_size: int = 8192
    tests: tuple[str, ...] = ("tests/kernels/triton",)
    batches: tuple[int, ...] = (1, 32, 8)  # what must be shown is about the first two
    prompts: int = 6  # at least, of a batch or of several
    peer_prompts: int = 3  # likewise, of transformers
    runs: int = 2  # of every drafter
    passes: int = 100  # in a row, for the GPU's own time
    passes_a_turn: int = 8  # of the curve, likewise
    temperatures: tuple[float, ...] = (0.0, 1.0)
    max_tokens: int = 64
    max_model_len: int = 512
    long_model_len: int = 2048  # of the small model; 0: no long prompts


CONTEXTS = (1024, 8192, 32768, 131072 - 64)  # 64: room for the pass itself
ON_GPU = BenchSizes(("llama-3.2-1b", "llama-3.1-8b"), CONTEXTS, ("qwen3.5-4b",))


def rehearsal(tiny: Path) -> BenchSizes:
    """Everything once, on a model of one narrow layer."""
    return BenchSizes(
        (str(tiny),), (300,), rows=(1, 3), recurrent_rows=(5,), formats=("gguf:q4_k",), compiled_rows=(3,),
        tree_widths=(), repeats=1, cold_bytes=1, copy_bytes=1 << 16, matmul_size=32,
        tests=("tests/kernels/triton/test_rowwise.py", "-k", "edges"), batches=(2,), temperatures=(0.0,),
        prompts=1, peer_prompts=1, runs=1, passes=1, passes_a_turn=1, max_tokens=2, max_model_len=64,
        long_model_len=0,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Bench:
    """What every part is given."""

    kernels: Kernels
    sizes: BenchSizes
    folder: Path  # temporary
    small: str  # the model to run and to widen
    draft: str  # a model that drafts for it
    seconds: Seconds
    bandwidth: float  # bytes a second, read and written by a copy
    rehearses: bool
    widening: WideningProcess  # of the small model, and of its heads
    backend: str = "triton"  # kernels of engines, as `forerun` calls them

    @property
    def device(self) -> torch.device:
        """Where the kernels run."""
        return self.kernels.device


class Due:
    """The time a part may take; it asks before every case, so a part ends late by one case at most."""

    def __init__(self, seconds: float, clock: Callable[[], float] = perf_counter) -> None:
        self._clock = clock
        self._end = clock() + seconds

    @property
    def left_s(self) -> float:
        """Seconds until then, 0 from then on."""
        return max(0.0, self._end - self._clock())


def in_time(
    cases: Iterable[Case], due: Due, noted: Noted, name: Callable[[Case], str],
    measure: Callable[[Case], Iterable[dict[str, Any]]],
) -> None:  # fmt: skip
    """Rows of all cases; those that came too late or failed are named, so that no figure is missed silently."""
    for case in cases:
        if due.left_s == 0:
            noted.left_out(name(case))
            continue
        try:
            for row in measure(case):
                noted.rows(row)
        except Exception:  # one case must not cost the figures of the others; the run ends with status 1
            noted.error(name(case), traceback.format_exc())


def timer(device: torch.device) -> Seconds:
    """Median seconds of one of several calls, done together: by events around a graph of them on a GPU."""
    return _gpu_timer(device) if device.type == "cuda" else _host_seconds


def _gpu_timer(device: torch.device) -> Seconds:
    def seconds(calls: Sequence[Callable[[], object]], repeats: int) -> float:
        _, replay = CudaCapture(device)(lambda: [call() for call in calls])
        spans = [_between_events(replay) for _ in range(repeats + 1)]
        return median(spans[1:]) / len(calls)

    return seconds


def _between_events(run: Callable[[], object]) -> float:
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    run()
    last.record()
    last.synchronize()
    return first.elapsed_time(last) / 1e3


def _host_seconds(calls: Sequence[Callable[[], object]], repeats: int) -> float:
    spans = []
    for _ in range(repeats):
        start = perf_counter()
        for call in calls:
            call()
        spans.append(perf_counter() - start)
    return median(spans) / len(calls)


def back_to_back_s(run: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Seconds of a run among many that nobody waits for: the GPU's own time, where the host is ahead of it."""
    run()
    synchronize(device)
    start = perf_counter()
    for _ in range(repeats):
        run()
    synchronize(device)
    return (perf_counter() - start) / repeats


class RepeatedSource(RandomSource):
    """Random tensors of which those of one shape are made once: on a GPU each has its own copy."""

    def __init__(self, dtype: torch.dtype) -> None:
        """`dtype`: of every tensor."""
        super().__init__(dtype)
        self._made: dict[tuple[int, ...] | None, torch.Tensor] = {}

    def tensor(self, name: str, shape: Sequence[int] | None = None) -> torch.Tensor:
        """See `RandomSource`."""
        key = None if shape is None else tuple(shape)
        if key not in self._made:
            self._made[key] = super().tensor(name, shape)
        return self._made[key]


def tiny_model(folder: Path) -> Path:
    """A random Llama of one layer over bytes, for the rehearsal: an interpreted kernel costs by its programs."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM

    vocabulary = {letter: index for index, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(vocabulary), hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, max_position_embeddings=512, bos_token_id=None, eos_token_id=0,
        tie_word_embeddings=True,
    )  # fmt: skip
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder
