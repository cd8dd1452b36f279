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
import logging
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Any, Protocol

PREFILL_CHUNK = 512
MAX_TOKENS = 64  # of a pass that is not a prompt
IR_BITS = {  # the nearest of OpenVINO's own storages
    **dict.fromkeys(("Q2_K", "Q3_K", "Q4_0", "Q4_1", "Q4_K", "IQ4_NL", "IQ4_XS"), 4),
    **dict.fromkeys(("Q5_0", "Q5_1", "Q5_K", "Q6_K", "Q8_0"), 8),
    **dict.fromkeys(("F16", "BF16"), 16),
}
STORED = {  # engine that cannot read all -> storage that is compared: block type of the GGUF file it gets for it
    "openvino": {"F16": "F16", "BF16": "F16", **{name: name for name in ("Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q6_K")}},
    "openvino-ir": dict.fromkeys(IR_BITS, "F16"),
}
GRAPH = "openvino_model.xml"  # as OpenVINO GenAI names it


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
        self._given = given
        self._model = self._loaded(str(given["file"]).encode())
        if not self._model:
            raise RuntimeError(f"llama.cpp cannot load {given['file']}")
        self._contexts: dict[int, Any] = {}  # known tokens -> llama_context
        self._known: dict[int, Any] = {}  # likewise: bytes of all it knows, where positions cannot be dropped
        self._prompts: dict[int, Any] = {}  # likewise, empty

    def chain(self, context: int, tokens: int) -> float:
        """See PeerEngine."""
        own = self._contexts.get(context) or self._filled_context(context)
        self._timed(own, context, tokens)  # after which the state of recurrent layers is set back
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
        row: list[float] = self.all_logits(self._token_ids(tokens))[-1].tolist()
        return row

    def all_logits(self, ids: Sequence[int]) -> Any:
        """Logits after each of `ids` and those before it -> [len(ids), V] float32."""
        import numpy as np

        own = self._new_context(len(ids))
        size = self._api.llama_vocab_n_tokens(self._api.llama_model_get_vocab(self._model))
        parts = []
        for start in range(0, len(ids), PREFILL_CHUNK):
            part = ids[start : start + PREFILL_CHUNK]
            self._decode(own, part, start, all_logits=True)
            parts.append(np.ctypeslib.as_array(self._api.llama_get_logits(own), (len(part), size)).copy())
        self._api.llama_free(own)
        return np.concatenate(parts)

    def _filled_context(self, context: int) -> Any:
        """A context of its own for every length: attention looks at all cells in use."""
        own = self._contexts[context] = self._new_context(context + MAX_TOKENS)
        self._fill(own, context)
        if self._is_recurrent():
            size = self._api.llama_state_seq_get_size(own, 0)
            self._known[context] = (ctypes.c_uint8 * size)()
            self._api.llama_state_seq_get_data(own, self._known[context], size, 0)
        return own

    def _fill(self, own: Any, count: int) -> None:
        for start in range(0, count, PREFILL_CHUNK):
            self._decode(own, self._token_ids(min(PREFILL_CHUNK, count - start)), start, all_logits=False)

    def _new_context(self, size: int) -> Any:
        own = self._context(-(-size // 256) * 256)
        if not own:
            raise RuntimeError("llama.cpp cannot make a context")
        return own

    def _timed(self, own: Any, start: int, count: int) -> float:
        started = perf_counter()
        self._decode(own, self._token_ids(count), start, all_logits=True)
        seconds = perf_counter() - started
        self._forget(own, start)
        return seconds

    def _token_ids(self, count: int) -> list[int]:
        return token_ids(count, self._given["vocab_size"])

    def _decode(self, own: Any, ids: Sequence[int], start: int, all_logits: bool) -> None:
        if failed := self._pass(own, ids, start, all_logits):
            raise RuntimeError(f"llama_decode returned {failed}")

    def _loaded(self, file: bytes) -> Any:
        """The model; not true if that failed."""
        import llama_cpp

        logging.getLogger("llama-cpp-python").setLevel(logging.ERROR)  # whose handler writes what llama.cpp says
        self._api: Any = llama_cpp
        self.version = llama_cpp.__version__
        self.compared = f"the GGUF file in {self._given['type']}, KV cache float16"
        llama_cpp.llama_backend_init()
        params = llama_cpp.llama_model_default_params()
        params.n_gpu_layers = 0
        return llama_cpp.llama_model_load_from_file(file, params)

    def _context(self, size: int) -> Any:
        """A context for so many tokens; not true if that failed."""
        params = self._api.llama_context_default_params()
        params.n_ctx = size
        params.n_batch = params.n_ubatch = PREFILL_CHUNK
        params.n_threads = params.n_threads_batch = self._given["threads"]
        return self._api.llama_init_from_model(self._model, params)

    def _pass(self, own: Any, ids: Sequence[int], start: int, all_logits: bool) -> int:
        """What llama_decode returns, when it has ended."""
        batch = self._api.llama_batch_init(len(ids), 0, 1)
        batch.n_tokens = len(ids)
        for i, token in enumerate(ids):
            batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, start + i, 1
            batch.seq_id[i][0] = 0
            batch.logits[i] = all_logits or i == len(ids) - 1
        failed: int = self._api.llama_decode(own, batch)
        self._api.llama_synchronize(own)
        self._api.llama_batch_free(batch)
        return failed

    def _is_recurrent(self) -> bool:
        """Whether any layer is."""
        return bool(self._api.llama_model_is_recurrent(self._model) or self._api.llama_model_is_hybrid(self._model))

    def _forget(self, own: Any, start: int) -> None:
        """Drop positions from `start` on."""
        memory, known = self._api.llama_get_memory(own), self._known.get(start)
        self._api.llama_memory_seq_rm(memory, 0, start if known is None else 0, -1)
        if known is not None:
            self._api.llama_state_seq_set_data(own, known, len(known), 0)


class IkLlama(LlamaCpp):
    """ik_llama.cpp with the weights repacked while loading, by the library that is built from `ik_llama.cpp` here."""

    def _loaded(self, file: bytes) -> Any:
        address, floats = ctypes.c_void_p, ctypes.POINTER(ctypes.c_float)
        self._api = ctypes.CDLL(self._given["ik_llama"])
        for name in ("ik_load", "ik_context", "llama_model_get_vocab"):
            getattr(self._api, name).restype = address
        self._api.llama_model_get_vocab.argtypes = self._api.llama_vocab_n_tokens.argtypes = [address]
        self._api.llama_get_logits.restype, self._api.ik_commit.restype = floats, ctypes.c_char_p
        self.version = self._api.ik_commit().decode()
        self.compared = f"the GGUF file in {self._given['type']}, repacked while loading, KV cache float16"
        return address(self._api.ik_load(file))

    def _context(self, size: int) -> Any:
        own = self._api.ik_context(self._model, size, PREFILL_CHUNK, self._given["threads"])
        return ctypes.c_void_p(own)

    def _pass(self, own: Any, ids: Sequence[int], start: int, all_logits: bool) -> int:
        numbers = (ctypes.c_int32 * len(ids))(*ids)
        failed: int = self._api.ik_decode(own, numbers, len(ids), start, all_logits)
        return failed

    def _is_recurrent(self) -> bool:
        return False  # its library here has no calls for such models' states

    def _forget(self, own: Any, start: int) -> None:
        self._api.llama_kv_cache_seq_rm(own, 0, start, -1)


class OpenVino:
    """The model OpenVINO GenAI makes of the GGUF file, run by its runtime with the state set back between passes."""

    def __init__(self, given: dict[str, Any]) -> None:
        import numpy as np
        import openvino as ov
        import openvino_genai

        self._np: Any = np
        self._tensor: Any = ov.Tensor
        self._vocab_size: int = given["vocab_size"]
        folder, stored = self._model(converted(Path(given["file"])), given["type"])
        settings = {"INFERENCE_NUM_THREADS": given["threads"], "PERFORMANCE_HINT": "LATENCY", "NUM_STREAMS": 1}
        compiled = ov.Core().compile_model(str(folder / GRAPH), "CPU", settings)
        self.version = openvino_genai.__version__
        cache = compiled.get_property("KV_CACHE_PRECISION").to_string()
        precision = compiled.get_property("INFERENCE_PRECISION_HINT").to_string()
        self.compared = f"{stored}, KV cache {cache}, {precision}"
        self._request = compiled.create_infer_request()
        self._states: dict[int, list[Any]] = {}

    def _model(self, folder: Path, block_type: str) -> tuple[Path, str]:
        """The folder of what is compiled, and how its weights are stored."""
        return folder, f"the GGUF file in {STORED['openvino'][block_type]}, converted by OpenVINO GenAI"

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
                "input_ids": np.array([token_ids(count, self._vocab_size)], dtype=np.int64),
                "attention_mask": np.ones((1, start + count), dtype=np.int64),
                "position_ids": np.arange(start, start + count, dtype=np.int64)[None],
                "beam_idx": np.zeros(1, dtype=np.int32),
            }
        )


class OpenVinoIr(OpenVino):
    """The same with weights in OpenVINO's own storage."""

    def _model(self, folder: Path, block_type: str) -> tuple[Path, str]:
        bits = IR_BITS[block_type]
        return compressed(folder, bits), f"an IR in {f'int{bits} made by NNCF' if bits < 16 else 'F16'}"


def converted(file: Path) -> Path:
    """The folder of a GGUF file with the graph and the tokenizer OpenVINO GenAI makes of it, once."""
    import openvino_genai

    if not file.with_name(GRAPH).exists():
        openvino_genai.LLMPipeline(str(file), "CPU", enable_save_ov_model=True)
    return file.parent


def compressed(folder: Path, bits: int) -> Path:
    """A folder beside that graph with weights of so many bits, rounded by NNCF as OpenVINO advises, once."""
    import nncf
    import openvino as ov

    target, mode = folder / f"int{bits}", nncf.CompressWeightsMode
    if bits == 16 or (target / GRAPH).exists():
        return folder if bits == 16 else target
    given = {"mode": mode.INT8_ASYM} if bits == 8 else {"mode": mode.INT4_SYM, "group_size": 128, "ratio": 1.0}
    target.mkdir(exist_ok=True)
    for part in folder.glob("openvino_*tokenizer.*"):
        shutil.copy(part, target)
    ov.save_model(nncf.compress_weights(ov.Core().read_model(folder / GRAPH), **given), target / GRAPH)
    return target


ENGINES: dict[str, type[PeerEngine]] = {
    "forerun": Forerun, "llama.cpp": LlamaCpp, "ik_llama.cpp": IkLlama,
    "openvino": OpenVino, "openvino-ir": OpenVinoIr,
}  # fmt: skip


def file_type(engine: str, weights: str) -> str:
    """Block type of the GGUF file an engine gets where `weights` are compared."""
    return STORED.get(engine, {}).get(weights, weights)


def token_ids(count: int, vocab_size: int) -> list[int]:
    """The tokens `bench.passes` takes."""
    return [(17 + 7919 * index) % vocab_size for index in range(count)]


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
