"""One engine of several: it takes orders, tells what it is and how it fares, and knows when it is stuck.

Knows: its engine's service, orders. Does not know: Ray, other replicas, who sends orders.
"""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

from forerun.config import EngineConfig
from forerun.errors import ForerunError
from forerun.llm import LLM
from forerun.replicas.orders import Accepted, PromptFigures, Refusal, ReplicaOrder, group_of
from forerun.runtime.parallel.start import release, weights_stamp
from forerun.server.errors import REPLICA_CHANGED, ApiError, as_api_error
from forerun.server.grammar_compiler import GrammarCompiler
from forerun.server.metrics import EngineLoad
from forerun.server.service import EngineService
from forerun.server.settings import ServerSettings
from forerun.server.streams import Delta
from forerun.weights.identity import hash_of_file

Said = Accepted | PromptFigures | Refusal | list[Delta]


@dataclass(frozen=True, slots=True)
class Description:
    """What a process needs to know of a replica's model, to prepare requests for it."""

    kind: str
    config: EngineConfig
    tokenizer: bytes  # pickled
    vocab_size: int
    max_model_len: int
    sampling_defaults: Mapping[str, Any]
    adapters: Mapping[str, str]  # folders, by name


class Replica:
    """An engine that takes orders."""

    def __init__(self, name: str, llm: LLM, settings: ServerSettings) -> None:
        self._name = name
        self._llm = llm
        self._service = EngineService(llm, settings)
        self._grammars = GrammarCompiler(llm.tokenizer, llm.vocab_size, settings.grammar_timeout_s)
        self._kind = kind_of(llm)
        self._service.start()

    def describe(self) -> Description:
        """What it runs."""
        llm, seats = self._llm, self._service.num_seats
        adapters = {name: adapter.path for name, adapter in llm.adapters.items()}
        return Description(
            self._kind, replace(llm.config, max_num_seqs=seats), pickle.dumps(llm.tokenizer), llm.vocab_size,
            llm.max_model_len, dict(llm.sampling_defaults), adapters,
        )  # fmt: skip

    async def run(self, order: ReplicaOrder) -> AsyncIterator[Said]:
        """The name of this replica, then pieces of the answer until all samples have ended, or a refusal."""
        waits = self._service.num_behind(1) > 0  # no sample of it has a seat
        yield Accepted(self._name, waits)  # before a refusal, too, so that whoever is refused asks another one next
        try:
            if order.kind not in ("", self._kind):
                raise ApiError(
                    503, "the deployment is being changed to another model, release or device, and answers that began "
                    "before cannot be continued exactly: send the request again", code=REPLICA_CHANGED,
                    headers={"Retry-After": "1"},
                )  # fmt: skip
            self._service.check_room(len(order.written))
            group = await asyncio.to_thread(group_of, order, self._llm, self._grammars)
            stream = self._service.submit(group, order.constrained)
            try:
                first = group.samples[0]
                tell_prompt = first.request.prompt_logprobs is not None
                async for deltas in stream.deltas():
                    if tell_prompt and any(delta.index == 0 for delta in deltas):
                        tell_prompt = False
                        yield PromptFigures(first.prompt_logprobs)
                    yield deltas
            finally:
                self._service.abort(stream)
        except (ApiError, ForerunError) as error:
            yield Refusal.of(as_api_error(error, order.constrained))

    def load(self) -> EngineLoad:
        """How busy the engine is."""
        return self._service.load()

    def metrics_text(self) -> bytes:
        """The engine's metrics, as Prometheus reads them."""
        return self._service.metrics.text()

    def check(self, stuck_s: float) -> None:
        """Raise RuntimeError if the engine has failed, or no step has ended for that long while requests run."""
        if not self._service.healthy:
            raise RuntimeError("the engine has stopped working")
        if self._service.step_s > stuck_s:
            raise RuntimeError(f"a step of the engine has taken {self._service.step_s:.0f} s and has not ended")

    def stop(self) -> None:
        """End what runs, and the threads and processes behind it."""
        self._service.stop()
        self._grammars.close()


def kind_of(llm: LLM) -> str:
    """Equal for engines that write the same tokens: by release, weights, device and what changes roundings."""
    config, device = llm.config, llm.engine.kv_cache.device
    parts = (
        release(), weights_stamp(config), config.model, config.dtype, config.implementation, config.activations,
        config.kv_cache_dtype, config.generation_config, _adapters(config.lora), device.type,
        torch.cuda.get_device_name(device) if device.type == "cuda" else "", llm.max_model_len,
    )  # fmt: skip
    return sha256(repr(parts).encode()).hexdigest()[:16]


def _adapters(folders: Mapping[str, str]) -> list[tuple[str, str, list[str]]]:
    """Names, folders and what the files there hold."""
    found = []
    for name, folder in sorted(folders.items()):
        files = sorted(Path(folder).expanduser().glob("adapter_*"))  # configuration and matrices, as PEFT names them
        found.append((name, folder, [hash_of_file(path) for path in files]))
    return found
