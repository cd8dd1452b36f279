"""An engine that answers rows of a batch, in the process that has it.

Knows: how the server's application is set up for rows. Does not know: where rows come from, where answers go.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Final, NamedTuple

from forerun.llm import LLM
from forerun.server.app import create_app
from forerun.server.batches import AnswerRow, BatchServer, answer_row
from forerun.server.settings import ServerSettings

SAMPLES: Final = 64  # most answers of one row
GRAMMAR_S: Final = 120.0  # for compiling a schema: nobody waits
AHEAD: Final = 2  # rows given to the engine for each that it computes, so that none of its seats waits


class Answering(NamedTuple):
    """Who answers rows, and how many samples it wants at a time."""

    answer: AnswerRow
    num_at_once: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RowOptions:
    """What every engine of a job must know; it is sent to other machines."""

    names: tuple[str, ...]  # of the model in the rows
    any_model: bool  # answer rows whatever model they name
    seed: int
    max_num_seqs: int  # of each engine
    max_row_bytes: int

    @property
    def num_at_once(self) -> int:
        """Samples that one engine is given."""
        return AHEAD * self.max_num_seqs


@asynccontextmanager
async def answering(llm: LLM, options: RowOptions) -> AsyncIterator[Answering]:
    """The engine as one that answers rows. Raises ConfigError for an adapter that has the model's name."""
    settings = ServerSettings(
        served_names=options.names, max_queue=options.num_at_once * SAMPLES, max_connections=options.num_at_once + 1,
        max_samples=SAMPLES, max_body_bytes=2 * options.max_row_bytes + (1 << 20), warm_grammars=False,
        grammar_timeout_s=GRAMMAR_S, in_batch=True,
    )  # fmt: skip
    settings.check_adapters(llm.adapters)
    app = create_app(llm, settings)
    service = app.state.service
    model = options.names[0] if options.any_model else None
    server = BatchServer(app, lambda: bool(service.healthy), options.seed, model)
    async with app.router.lifespan_context(app):
        yield Answering(partial(answer_row, server), options.num_at_once)
