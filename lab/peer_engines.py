"""One engine in a process of its own: loads a model, then times a pass for every line it is asked on standard input.

    python lab/peer_engines.py ENGINE '{"shape": ..., "weights": ..., "file": ..., "threads": ..., ...}'

A line is `CONTEXT TOKENS` (a pass over TOKENS tokens with logits for all, after CONTEXT known ones) or `prefill
TOKENS`; the answer is its seconds. Before every pass over a chain another one, which does not count, brings back into
the caches what the engines in between have driven out. `logits TOKENS` answers with the last row of logits, which shows
whether the engines compute the same.
Knows: the lowest public interface of each engine. Does not know: turns, tables.
"""

from __future__ import annotations

import ctypes
import json
import sys
from pathlib import Path
from time import perf_counter
from typing import Any, Protocol

PREFILL_CHUNK = 512
MAX_TOKENS = 64  # of a pass that is not a prompt


class PeerEngine(Protocol):
    """What is compared."""

    version: str
    compared: str  # storage and settings, for people

    def chain(self, context: int, tokens: int) -> float:
        """Seconds of a pass over `tokens` tokens after `context` known ones, logits for all."""

    def prefill(self, tokens: int) -> float:
        """Seconds of a prompt of `tokens`, logits for the last one where the engine can be told so."""

    def logits(self, tokens: int) -> list[float]:
        """Logits after the last of `tokens` tokens and nothing before them."""


class Forerun:
    """The recorded forward of forerun's own kernels on the GGUF file."""

    def __init__(self, given: dict[str, Any]) -> None:
        import forerun
        from forerun.bench.passes import TimedPasses
        from forerun.kernels.select import select_kernels
        from forerun.models.loader import load_model

        kernels = select_kernels("auto", given["threads"])
        model: Any = load_model(given["file"], kernels, max_position=given["max_rows"]).model
        self.version = forerun.__version__
        self.compared = f"the GGUF file in {given['type']}, KV cache {model.kv_specs[0].dtype}, {kernels.name}"
        self._passes = TimedPasses(model, kernels, given["max_rows"])

    def chain(self, context: int, tokens: int) -> float:
        """See PeerEngine."""
        batch = self._passes.chain(context, tokens)
        self._passes.run(batch)
        start = perf_counter()
        self._passes.run(batch)
        return perf_counter() - start

    def prefill(self, tokens: int) -> float:
        """See PeerEngine."""
        start = perf_counter()
        for batch in self._passes.chunks(tokens, PREFILL_CHUNK):
            self._passes.run(batch)
        return perf_counter() - start

    def logits(self, tokens: int) -> list[float]:
        """See PeerEngine."""
        passes = self._passes
        row: list[float] = passes.runner.run(passes.chain(0, tokens)).logits[-1].tolist()
        return row


class LlamaCpp:
    """llama_decode on the GGUF file, as llama-cpp-python's ctypes bindings give it."""

    def __init__(self, given: dict[str, Any]) -> None:
        import llama_cpp

        self._api: Any = llama_cpp
        self.version = llama_cpp.__version__
        self.compared = f"the GGUF file in {given['type']}, KV cache float16"
        self._given = given
        llama_cpp.llama_backend_init()
        params = llama_cpp.llama_model_default_params()
        params.n_gpu_layers = 0
        self._model = llama_cpp.llama_model_load_from_file(str(given["file"]).encode(), params)
        if not self._model:
            raise RuntimeError(f"llama.cpp cannot load {given['file']}")
        self._contexts: dict[int, Any] = {}  # known tokens -> llama_context
        self._prompts: dict[int, Any] = {}  # likewise, empty

    def chain(self, context: int, tokens: int) -> float:
        """See PeerEngine."""
        own = self._contexts.get(context) or self._filled_context(context)
        self._timed(own, context, tokens)
        return self._timed(own, context, tokens)

    def prefill(self, tokens: int) -> float:
        """See PeerEngine."""
        own = self._prompts.get(tokens) or self._new_context(tokens)
        self._prompts[tokens] = own
        started = perf_counter()
        self._fill(own, tokens)
        seconds = perf_counter() - started
        self._forget(own, 0)
        return seconds

    def logits(self, tokens: int) -> list[float]:
        """See PeerEngine."""
        own = self._new_context(tokens)
        self._fill(own, tokens)
        size = self._api.llama_vocab_n_tokens(self._api.llama_model_get_vocab(self._model))
        return list(self._api.llama_get_logits_ith(own, -1)[:size])

    def _filled_context(self, context: int) -> Any:
        """A context of its own for every length: attention looks at all cells in use."""
        own = self._contexts[context] = self._new_context(context + MAX_TOKENS)
        self._fill(own, context)
        return own

    def _fill(self, own: Any, count: int) -> None:
        for start in range(0, count, PREFILL_CHUNK):
            self._decode(own, start, min(PREFILL_CHUNK, count - start), all_logits=False)

    def _new_context(self, size: int) -> Any:
        params = self._api.llama_context_default_params()
        params.n_ctx = -(-size // 256) * 256
        params.n_batch = params.n_ubatch = PREFILL_CHUNK
        params.n_threads = params.n_threads_batch = self._given["threads"]
        own = self._api.llama_init_from_model(self._model, params)
        if not own:
            raise RuntimeError("llama.cpp cannot make a context")
        return own

    def _timed(self, own: Any, start: int, count: int) -> float:
        started = perf_counter()
        self._decode(own, start, count, all_logits=True)
        seconds = perf_counter() - started
        self._forget(own, start)
        return seconds

    def _decode(self, own: Any, start: int, count: int, all_logits: bool) -> None:
        batch = self._api.llama_batch_init(count, 0, 1)
        batch.n_tokens = count
        for i in range(count):
            batch.token[i], batch.pos[i], batch.n_seq_id[i] = token_id(i, self._given["vocab_size"]), start + i, 1
            batch.seq_id[i][0] = 0
            batch.logits[i] = all_logits or i == count - 1
        failed = self._api.llama_decode(own, batch)
        self._api.llama_synchronize(own)
        self._api.llama_batch_free(batch)
        if failed:
            raise RuntimeError(f"llama_decode returned {failed}")

    def _forget(self, own: Any, start: int) -> None:
        """Drop positions from `start` on."""
        self._api.llama_memory_seq_rm(self._api.llama_get_memory(own), 0, start, -1)


class OpenVino:
    """The model OpenVINO GenAI makes of the GGUF file, run by its runtime with the state set back between passes."""

    def __init__(self, given: dict[str, Any]) -> None:
        import numpy as np
        import openvino as ov
        import openvino_genai

        self._np: Any = np
        self._tensor: Any = ov.Tensor
        self._vocab_size: int = given["vocab_size"]
        file = Path(given["file"])
        graph = file.with_name("openvino_model.xml")
        if not graph.exists():
            openvino_genai.LLMPipeline(str(file), "CPU", enable_save_ov_model=True)
        settings = {"INFERENCE_NUM_THREADS": given["threads"], "PERFORMANCE_HINT": "LATENCY", "NUM_STREAMS": 1}
        compiled = ov.Core().compile_model(str(graph), "CPU", settings)
        self.version = openvino_genai.__version__
        cache = compiled.get_property("KV_CACHE_PRECISION").to_string()
        precision = compiled.get_property("INFERENCE_PRECISION_HINT").to_string()
        self.compared = f"the GGUF file in {given['type']}, converted by OpenVINO GenAI, KV cache {cache}, {precision}"
        self._request = compiled.create_infer_request()
        self._states: dict[int, list[Any]] = {}

    def chain(self, context: int, tokens: int) -> float:
        """See PeerEngine. The last known token is computed again first: after that the cache has room to grow in."""
        self._set_back(max(context - 1, 0))
        self._infer(max(context - 1, 0), min(context, 1) or tokens)
        if not context:
            self._request.reset_state()
        started = perf_counter()
        self._infer(context, tokens)
        return perf_counter() - started

    def prefill(self, tokens: int) -> float:
        """See PeerEngine. Logits of all tokens are computed: the converted model has no other output."""
        self._request.reset_state()
        started = perf_counter()
        for start in range(0, tokens, PREFILL_CHUNK):
            self._infer(start, min(PREFILL_CHUNK, tokens - start))
        return perf_counter() - started

    def logits(self, tokens: int) -> list[float]:
        """See PeerEngine."""
        self._request.reset_state()
        self._infer(0, tokens)
        row: list[float] = self._request.get_tensor("logits").data[0, -1].tolist()
        return row

    def _set_back(self, context: int) -> None:
        if context and context not in self._states:
            self._request.reset_state()
            for start in range(0, context, PREFILL_CHUNK):
                self._infer(start, min(PREFILL_CHUNK, context - start))
            self._states[context] = [self._copy(state.state) for state in self._request.query_state()]
        self._request.reset_state()
        for state, kept in zip(self._request.query_state(), self._states.get(context, ()), strict=False):
            state.state = kept

    def _copy(self, tensor: Any) -> Any:
        return self._tensor(self._np.array(tensor.data))

    def _infer(self, start: int, count: int) -> None:
        np = self._np
        self._request.infer(
            {
                "input_ids": np.array([[token_id(i, self._vocab_size) for i in range(count)]], dtype=np.int64),
                "attention_mask": np.ones((1, start + count), dtype=np.int64),
                "position_ids": np.arange(start, start + count, dtype=np.int64)[None],
                "beam_idx": np.zeros(1, dtype=np.int32),
            }
        )


ENGINES: dict[str, type[PeerEngine]] = {"forerun": Forerun, "llama.cpp": LlamaCpp, "openvino": OpenVino}


def token_id(index: int, vocab_size: int) -> int:
    """The tokens `bench.passes` takes."""
    return (17 + 7919 * index) % vocab_size


def answer(engine: PeerEngine, first: str, tokens: str) -> Any:
    """What a line asks for."""
    if first == "logits":
        return engine.logits(int(tokens))
    return engine.prefill(int(tokens)) if first == "prefill" else engine.chain(int(first), int(tokens))


def answers_only() -> Any:
    """Standard output as it was, while whatever the engines print goes to standard error."""
    import os

    kept = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    ctypes.CDLL(None).fflush(None)
    return kept


def main() -> None:
    """Load, say what was loaded, answer until the input ends."""
    output = answers_only()
    engine = ENGINES[sys.argv[1]](json.loads(sys.argv[2]))  # type: ignore[call-arg]
    print(json.dumps({"version": engine.version, "compared": engine.compared}), file=output, flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(engine, *line.split())), file=output, flush=True)


if __name__ == "__main__":
    main()
