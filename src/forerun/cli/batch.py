"""`forerun batch`: answer a file of requests.

Knows: options, progress, signals, what is printed. Does not know: rows and their answers (`server.batches`), files
(`server.batch_files`).
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager, closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forerun.cli import options as opt
from forerun.cli.console import out, print_json, progress
from forerun.cli.engine import engine_options, needing, open_llm
from forerun.cli.groups import values
from forerun.cli.serve import ServedDrafting, ServedEngine
from forerun.errors import ConfigError, ResourceError

if TYPE_CHECKING:
    from forerun.server.batch_engine import Answering
    from forerun.server.batch_files import BatchInput, BatchOutput
    from forerun.server.batches import Shard

BATCH, CLUSTER = "Batch", "Cluster"


def _batch(help_text: str, *names: str, **limits: Any) -> Any:
    return typer.Option(*names, help=help_text, rich_help_panel=BATCH, **limits)


def _cluster(help_text: str, **limits: Any) -> Any:
    return typer.Option(help=help_text, rich_help_panel=CLUSTER, **limits)


@dataclass(frozen=True, slots=True, kw_only=True)
class Files:
    """What is read and written."""

    rows: Annotated[Path, typer.Argument(metavar="IN.jsonl", help="Requests in OpenAI's batch format.")]
    answers: Annotated[Path, typer.Argument(metavar="OUT.jsonl", help="Answers; failed rows go to OUT.errors.jsonl.")]
    model: opt.ModelOption = None
    resume: Annotated[bool, _batch("Go on with OUT; what it and OUT.errors have is not done again.", "--resume")] = (
        False
    )
    retry_errors: Annotated[bool, _batch("With --resume: do the rows in OUT.errors again.", "--retry-errors")] = False
    shard: Annotated[str, _batch("I/N: do the I-th of N parts; parts are told apart by custom_id.")] = "1/1"
    served_model_name: Annotated[list[str] | None, _batch("Name of the model in the rows; repeatable.")] = None
    any_model: Annotated[bool, _batch("Answer rows whatever model they name.", "--any-model")] = False
    max_row_bytes: Annotated[int, _batch("Longest row.", min=1)] = 8 << 20
    drain_s: Annotated[float, _batch("Time for running rows to end on a signal.", "--drain-seconds", min=0)] = 8.0
    json: opt.JsonOption = False


@dataclass(frozen=True, slots=True, kw_only=True)
class OnCluster:
    """Where rows are answered, if not here."""

    ray: Annotated[str | None, _cluster("Answer on a Ray cluster: HOST:PORT, ray://HOST:PORT, or auto.")] = None
    ray_workers: Annotated[int | None, _cluster("Engines; as many as there is room for unless given.", min=1)] = None
    ray_cpus: Annotated[float | None, _cluster("CPUs of each; those of the smallest node unless given.", min=1)] = None
    ray_gpus: Annotated[float, _cluster("GPUs of each.", min=0)] = 0.0


def batch(files: Files, cluster: OnCluster, engine: ServedEngine, drafting: ServedDrafting) -> None:
    """Answer a file of requests, many at a time. The answers depend on the rows and --seed alone."""
    import asyncio

    with needing("server", "batch"):
        from forerun.server.batch_files import BatchInput, MadeWith, open_answers

    name, shard = opt.chosen_model(None, files.model), _shard(files.shard)
    _check(files, cluster, drafting)
    with _locked(files.answers):
        output, made_with = open_answers(files.answers, files.resume, files.retry_errors), MadeWith(name, engine.seed)
        if goes_on := output.exists():
            made_with.check(files.answers)
        rows = BatchInput.scan(files.rows, files.max_row_bytes, shard, output.ids)
        answering = _answering(name, files, cluster, engine, drafting) if rows.places else None

        def begin() -> None:
            """Once there is an engine: what earlier runs could not do is forgotten, or remains."""
            if not goes_on:
                made_with.keep(files.answers)
            output.answers.begin()
            if files.retry_errors:
                output.errors.forget()
            for bad in rows.bad:
                output.errors.write(bad.answer())

        with closing(output):
            if answering is None:
                begin()
            else:
                asyncio.run(_answer(answering, begin, files.drain_s, rows, output))
    num_left = len(rows.places) + len(rows.bad) - output.answers.num_new - output.errors.num_new
    _report(files, rows.num_done, output, num_left)
    if num_left:
        raise typer.Exit(128 + signal.SIGTERM)


def _check(files: Files, cluster: OnCluster, drafting: ServedDrafting) -> None:
    """Raise ConfigError for what would lose rows or make answers depend on the run."""
    if drafting.verification != "coupled":
        raise ConfigError(
            f"--verification {drafting.verification} makes answers depend on drafts, and so on how a batch is run: use "
            "coupled"
        )
    if files.rows.exists() and files.answers.exists() and files.rows.samefile(files.answers):
        raise ConfigError(f"{files.answers} has the rows: choose another path for the answers")
    if cluster.ray is None and cluster != OnCluster():
        raise ConfigError(
            "--ray-workers, --ray-cpus and --ray-gpus say how --ray is used: give its address, or none of them"
        )


def _shard(text: str) -> Shard:
    from forerun.server.batches import Shard

    index, _, count = text.partition("/")
    if not (index.isdecimal() and count.isdecimal() and 1 <= int(index) <= int(count)):
        raise ConfigError(f"--shard must be I/N with I from 1 to N, such as 1/3; got {text!r}")
    return Shard(int(index), int(count))


@contextmanager
def _locked(answers: Path) -> Iterator[None]:
    """Keep other processes from writing the same file. Raises ConfigError if one does."""
    if not answers.parent.is_dir():
        raise ConfigError(f"there is no folder {answers.parent} for {answers.name}: make it, or choose another")
    from filelock import FileLock, Timeout

    lock = FileLock(f"{answers}.lock", timeout=0)
    try:
        with lock:
            try:
                yield
            finally:
                with suppress(OSError):
                    Path(lock.lock_file).unlink()  # while it is held: nobody else can hold it when it is gone
    except Timeout as error:
        raise ConfigError(f"another process is writing {answers}: wait for it, or choose another path") from error


def _answering(
    name: str, files: Files, cluster: OnCluster, engine: ServedEngine, drafting: ServedDrafting
) -> AbstractAsyncContextManager[Answering]:
    """What answers rows: an engine that is loaded here, or a cluster whose workers begin when it is entered."""
    with needing("server", "batch"):
        from forerun.server.batch_engine import RowOptions, answering
        from forerun.server.settings import model_id

    given = {**drafting.of(name), **values(engine)}
    options = RowOptions(
        names=tuple(files.served_model_name or (model_id(name),)), any_model=files.any_model, seed=engine.seed,
        max_num_seqs=engine.max_num_seqs, max_row_bytes=files.max_row_bytes,
    )  # fmt: skip
    if cluster.ray is None:
        return answering(open_llm(name, **given), options)
    from forerun.drafters.named import engine_config, whole_paths
    from forerun.server.batch_cluster import WorkerShape, cluster_answering

    if given["threads"] is None and cluster.ray_cpus is not None:
        given["threads"] = int(cluster.ray_cpus)
    shape = WorkerShape(num_workers=cluster.ray_workers, cpus=cluster.ray_cpus, gpus=cluster.ray_gpus)
    sent = whole_paths({**engine_options(**given), "model": name})  # workers begin in folders of their own
    model = sent.pop("model")
    engine_config(model, sent)  # what is wrong with the options is said before the cluster is asked for anything
    return cluster_answering(cluster.ray, shape, model, sent, options)


async def _answer(
    answering: AbstractAsyncContextManager[Answering], begin: Callable[[], None], drain_s: float, rows: BatchInput,
    output: BatchOutput,
) -> None:  # fmt: skip
    """Answer the rows that are left, or until a signal comes."""
    import asyncio

    from forerun.server.batches import Stops, UnavailableError, answer_all

    stops, loop = Stops(asyncio.Event(), asyncio.Event()), asyncio.get_running_loop()
    try:
        async with answering as (answer, num_at_once):
            begin()
            with suppress(NotImplementedError):  # Windows, where Ctrl-C ends it as any program
                for number in (signal.SIGTERM, signal.SIGINT):
                    loop.add_signal_handler(number, stops.signal)
            with progress("rows", len(rows.places)) as advance:  # whose time left does not count loading

                def write(succeeded: bool, answer: dict[str, Any]) -> None:
                    output.file(succeeded).write(answer)
                    advance(1)

                await answer_all(answer, rows.rows(), lambda: num_at_once, stops, drain_s, write)
    except UnavailableError as error:
        raise ResourceError(f"{error}; what was answered is kept: --resume goes on") from error


def _report(files: Files, num_done: int, output: BatchOutput, num_left: int) -> None:
    answers, errors = output.answers, output.errors
    figures = {"answered": answers.num_new, "failed": errors.num_new, "done_before": num_done, "left": num_left}
    if files.json:
        there = str(errors.path) if errors.path.exists() else None
        print_json({**figures, "answers": str(answers.path), "errors": there})
        return
    said = [f"{answers.num_new} rows answered in {answers.path}"]
    said += [f"{num_done} were done before"] if num_done else []
    said += [f"{errors.num_new} failed: {errors.path} says why"] if errors.num_new else []
    said += [f"{num_left} are left: --resume goes on with them"] if num_left else []
    out().print("; ".join(said), soft_wrap=True)
