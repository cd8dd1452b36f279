"""`forerun bench serve`: parsing, loads on a clock that jumps, and the whole command against a small server."""

from __future__ import annotations

import asyncio
import errno
import json
import selectors
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("aiohttp", reason="the extra 'server' is not installed")

from aiohttp import web
from typer.testing import CliRunner

from forerun.bench.prompts import PromptCase
from forerun.bench.serve_client import RequestOutcome, api_root, open_client
from forerun.bench.serve_events import AnswerError, EventParser, StreamPiece, read_piece
from forerun.bench.serve_load import LoadRun, OfferedLoad, arrival_times, measure_scale, warm_up
from forerun.bench.serve_report import Objective, percentile, spread, summary
from forerun.bench.serve_workload import (
    Ask,
    Conversation,
    Lengths,
    Prefixes,
    RequestFields,
    Scale,
    from_cases,
    some_words,
    synthetic,
)  # fmt: skip
from forerun.cli.app import app as cli
from forerun.errors import ConfigError

FIELDS = RequestFields("m", 8, 0.0, 5)


# -- server-sent events -----------------------------------------------------------------------------------------

STREAM = (
    b"\xef\xbb\xbfdata: one\n\n: a comment\n\ndata:two\r\ndata: lines\r\n\r\nevent: x\rdata: \xc3\xa9\r\r"
    b"id: 7\n\ndata: [DONE]\n\ndata: unfinished"
)
EVENTS = ["one", "two\nlines", "é", "[DONE]"]


def test_events_split_at_any_byte() -> None:
    for cut in range(len(STREAM) + 1):
        parser = EventParser()
        assert parser.feed(STREAM[:cut]) + parser.feed(STREAM[cut:]) == EVENTS, cut


def test_events_byte_by_byte() -> None:
    parser = EventParser()
    assert [data for i in range(len(STREAM)) for data in parser.feed(STREAM[i : i + 1])] == EVENTS


def test_events_that_are_no_text_or_never_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forerun.bench.serve_events.MAX_EVENT_BYTES", 1000)
    with pytest.raises(AnswerError, match="not UTF-8"):
        EventParser().feed(b"data: \xff\n\n")
    parser = EventParser()
    with pytest.raises(AnswerError, match="more than"):
        for _ in range(4):
            parser.feed(b"x" * 400)
    assert len(EventParser().feed(b"data: x\n\n" * 400)) == 400


@pytest.mark.parametrize(
    ("chunk", "expected"),
    [
        ({"choices": [{"delta": {"role": "assistant", "content": ""}}]}, StreamPiece("", None, None, None)),
        ({"choices": [{"delta": {"content": "a"}, "finish_reason": "stop"}]}, StreamPiece("a", "stop", None, None)),
        ({"choices": [{"delta": {"reasoning_content": "r"}}]}, StreamPiece("r", None, None, None)),
        ({"choices": [{"delta": {"tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}}]},
         StreamPiece("f{}", None, None, None)),
        ({"choices": [{"text": "b", "finish_reason": None}]}, StreamPiece("b", None, None, None)),
        ({"choices": [], "usage": {"completion_tokens": 3}, "forerun": {"num_steps": 2}},
         StreamPiece("", None, {"completion_tokens": 3}, 2)),
    ],
)  # fmt: skip
def test_pieces(chunk: dict[str, Any], expected: StreamPiece) -> None:
    assert read_piece(json.dumps(chunk)) == expected


@pytest.mark.parametrize(
    ("data", "kind"),
    [("{", "bad answer"), ("[]", "bad answer"), ('{"choices": {"a": 1}}', "bad answer"),
     ('{"choices": [{"delta": "x"}]}', "bad answer"), ('{"error": {"message": "no"}}', "error in the stream")],
)  # fmt: skip
def test_pieces_that_are_none(data: str, kind: str) -> None:
    with pytest.raises(AnswerError) as caught:
        read_piece(data)
    assert caught.value.kind == kind


# -- what is asked ----------------------------------------------------------------------------------------------


def test_turns_carry_the_answers_before_them() -> None:
    chat = Conversation(("one", "two"), True, "be kind")
    assert [m["content"] for m in chat.ask(["first"], {}).body["messages"]] == ["be kind", "one", "first", "two"]
    assert [m["role"] for m in chat.ask(["first"], {}).body["messages"]] == ["system", "user", "assistant", "user"]
    assert Conversation(("one", "two"), False).ask(["first"], {}) == Ask(
        "/completions", {"prompt": "one\n\nfirst\n\ntwo"}
    )
    assert Conversation(("one",), False, "before").ask([], {}).body["prompt"] == "before\n\none"


def test_synthetic_texts_depend_on_the_seed_and_share_prefixes() -> None:
    scale = Scale(per_word=2.0, base=10.0)
    talks = synthetic(4, Lengths(30), Prefixes(20, 2), scale, seed=1)
    assert [len(talk.turns[0].split()) for talk in talks] == [10] * 4  # (30 - 10) / 2
    assert [len(talk.prefix.split()) for talk in talks] == [10] * 4
    assert talks[0].prefix == talks[2].prefix != talks[1].prefix == talks[3].prefix
    assert len({talk.turns for talk in talks}) == 4
    assert synthetic(4, Lengths(30), Prefixes(20, 2), scale, seed=1) == talks
    assert synthetic(4, Lengths(30), Prefixes(20, 2), scale, seed=2)[0] != talks[0]


def test_lengths_are_spread_around_their_mean() -> None:
    drawn = Lengths(100, 0.5).draw(400, seed=3)
    assert min(drawn) < 60 and max(drawn) > 140 and all(50 <= n <= 150 for n in drawn)


def test_conversations_of_a_file_hold_as_many_turns_as_asked() -> None:
    cases = [PromptCase(("a", "b"), True, "x", "f:1"), PromptCase(("c",), False, "x", "f:2")]
    talks = from_cases(5, cases, Prefixes(), Scale(), 0)
    assert [talk.turns for talk in talks] == [("a", "b"), ("c",), ("a", "b")]
    assert [talk.is_chat for talk in talks] == [True, False, True]
    assert [talk.turns for talk in from_cases(4, cases, Prefixes(), Scale(), 0)][-1] == ("a",)
    assert all(not talk.is_chat for talk in from_cases(5, cases, Prefixes(), Scale(), 0, "completions"))


def test_conversations_name_models_in_turn() -> None:
    fields = RequestFields("m,sql,chat", 8, 0.0, 5)
    assert [fields.body(index)["model"] for index in range(4)] == ["m", "sql", "chat", "m"]
    assert FIELDS.body(3)["model"] == "m"


def test_extra_fields_may_not_replace_options() -> None:
    with pytest.raises(ConfigError, match="stream"):
        RequestFields("m", 1, 0.0, 0, extra={"stream": False})


@pytest.mark.parametrize(
    ("url", "root"),
    [
        ("http://h:1", "http://h:1/v1"),
        ("http://h/v1/", "http://h/v1"),
        ("https://h/api/v3", "https://h/api/v3"),
        ("http://[::1]:8000", "http://[::1]:8000/v1"),
    ],
)
def test_addresses(url: str, root: str) -> None:
    assert api_root(url) == root


@pytest.mark.parametrize("url", ["h:8000", "ftp://h", "http://", "http://h/?x=1", "http://[::1:8000", "http://h:port"])
def test_addresses_that_are_none(url: str) -> None:
    with pytest.raises(ConfigError, match="address"):
        api_root(url)


# -- loads, on a clock that jumps -------------------------------------------------------------------------------


class _Jumping(selectors.DefaultSelector):
    """Never waits: the clock jumps to when the next timer is due."""

    now_s = 0.0

    def select(self, timeout: float | None = None) -> Any:
        self.now_s += timeout or 0.0
        return super().select(0)


class _FakeTime(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._jumping = _Jumping()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now_s


def in_fake_time(work: Coroutine[Any, Any, Any]) -> Any:
    with asyncio.Runner(loop_factory=_FakeTime) as runner:
        return runner.run(work)


class FakeServer:
    """Answers after known delays: the first piece after `first_s`, each of the others after `next_s`."""

    def __init__(self, first_s: Sequence[float] = (1.0,), next_s: float = 0.25, num_pieces: int = 5) -> None:
        self._first_s, self._next_s, self._num_pieces = first_s, next_s, num_pieces
        self.asked: list[Ask] = []

    async def __call__(self, ask: Ask, arrived_s: float) -> RequestOutcome:
        clock = asyncio.get_running_loop().time
        outcome, number = RequestOutcome(arrived_s, clock()), len(self.asked)
        self.asked.append(ask)
        for i in range(self._num_pieces):
            await asyncio.sleep(self._next_s if i else self._first_s[number % len(self._first_s)])
            outcome.add(StreamPiece("x", None, None, None), clock())
        outcome.usage = {"completion_tokens": 9, "prompt_tokens": 3}
        outcome.ended_s = clock()
        return outcome


def some_talks(count: int) -> list[Conversation]:
    return [Conversation((f"text {i}",), True) for i in range(count)]


def test_closed_loop_figures_from_known_delays() -> None:
    first_s = [0.5, 1.0, 1.5, 2.0]
    server = FakeServer(first_s)
    outcomes = in_fake_time(LoadRun(server, FIELDS)(some_talks(4), OfferedLoad(4, None, 0)))
    report = summary(outcomes, Objective(ttft_s=1.0))
    assert report["ttft_s"] == pytest.approx({"mean": 1.25, "p50": 1.25, "p90": 1.85, "p99": 1.985})
    assert report["latency_s"]["p50"] == pytest.approx(2.25)  # four more pieces
    assert report["tpot_s"]["p50"] == pytest.approx(4 * 0.25 / 8)  # nine tokens in five pieces
    assert report["gap_s"]["p99"] == pytest.approx(0.25)
    assert report["duration_s"] == pytest.approx(3.0) and report["max_in_flight"] == 4
    assert report["requests_per_s"] == pytest.approx(4 / 3, abs=1e-6)
    assert report["output_tokens_per_s"] == pytest.approx(36 / 3) and report["prompt_tokens"] == 12
    assert report["goodput"]["share"] == 0.5
    assert [ask.body["seed"] for ask in server.asked] == [5, 6, 7, 8]


def test_closed_loop_keeps_its_concurrency() -> None:
    outcomes = in_fake_time(LoadRun(FakeServer(), FIELDS)(some_talks(6), OfferedLoad(2, None, 0)))
    assert summary(outcomes, Objective())["max_in_flight"] == 2
    assert [o.sent_s for o in outcomes] == pytest.approx([0, 0, 2, 2, 4, 4])
    assert [o.ttft_s for o in outcomes] == pytest.approx([1.0] * 6)


def test_open_loop_times_count_from_when_requests_were_due() -> None:
    times = arrival_times(50, 4.0, seed=1)
    free = in_fake_time(LoadRun(FakeServer(), FIELDS)(some_talks(50), OfferedLoad(None, 4.0, 1)))
    assert [o.sent_s for o in free] == pytest.approx(times) and [o.ttft_s for o in free] == pytest.approx([1.0] * 50)
    held = in_fake_time(LoadRun(FakeServer(), FIELDS)(some_talks(50), OfferedLoad(1, 4.0, 1)))
    assert [o.arrived_s for o in held] == pytest.approx(times)
    assert [o.sent_s for o in held] == pytest.approx([2.0 * i for i in range(50)])  # one after the other
    assert held[-1].ttft_s == pytest.approx(2.0 * 49 + 1.0 - times[-1])  # waiting for room counts


def test_arrivals_are_poisson() -> None:
    times = arrival_times(4001, 10.0, seed=2)
    gaps = np.diff(times)
    assert (
        times[0] == 0.0 and gaps.mean() == pytest.approx(0.1, rel=0.05) and gaps.std() == pytest.approx(0.1, rel=0.07)
    )
    assert times == arrival_times(4001, 10.0, seed=2) != arrival_times(4001, 10.0, seed=3)


def test_turns_follow_each_other_and_stop_at_a_failure() -> None:
    server = FakeServer()

    async def failing(ask: Ask, arrived_s: float) -> RequestOutcome:
        outcome = await server(ask, arrived_s)
        outcome.error = AnswerError("HTTP 500", "broken") if len(server.asked) == 2 else None
        return outcome

    seen: list[int] = []
    talk = Conversation(("a", "b", "c"), True)
    outcomes = in_fake_time(LoadRun(failing, FIELDS, seen.append)([talk], OfferedLoad(1, None, 0)))
    assert [m["content"] for m in server.asked[1].body["messages"]] == ["a", "xxxxx", "b"]
    assert outcomes[1].arrived_s == pytest.approx(2.0) and seen == [1, 1, 1]
    report = summary(outcomes, Objective())
    unasked = {"count": 1, "first": "an earlier turn of the conversation failed"}
    assert report["errors"] == {"HTTP 500": {"count": 1, "first": "broken"}, "not asked": unasked}
    assert report["num_answered"] == 1 and report["text_sha256"] is None


def test_the_length_of_words_is_measured() -> None:
    async def counting(ask: Ask, arrived_s: float) -> RequestOutcome:
        words = sum(len(m["content"].split()) for m in ask.body["messages"])
        return RequestOutcome(arrived_s, arrived_s, arrived_s, usage={"prompt_tokens": 12 + round(1.5 * words)})

    scale = in_fake_time(measure_scale(counting, FIELDS, "auto"))
    assert scale == Scale(1.5, 12.0, measured=True)
    assert scale.num_words(312) == 200 and scale.num_words(300, with_base=False) == 200


def test_without_counts_a_word_is_taken_for_a_token() -> None:
    async def silent(ask: Ask, arrived_s: float) -> RequestOutcome:
        return RequestOutcome(arrived_s, arrived_s, arrived_s)

    assert in_fake_time(measure_scale(silent, FIELDS, "auto")) == Scale()


def test_warming_up_must_work() -> None:
    async def refusing(ask: Ask, arrived_s: float) -> RequestOutcome:
        return RequestOutcome(arrived_s, arrived_s, arrived_s, error=AnswerError("HTTP 401", "no key"))

    with pytest.raises(ConfigError, match="HTTP 401: no key"):
        in_fake_time(warm_up(refusing, FIELDS, 1, 1, "chat"))


def test_loads_that_are_none() -> None:
    with pytest.raises(ConfigError, match="rate"):
        OfferedLoad(None, 0.0, 0)
    with pytest.raises(ConfigError, match="neither"):
        OfferedLoad(None, None, 0)


# -- figures ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 7, 100])
def test_percentiles_are_numpys(count: int) -> None:
    values = np.random.default_rng(count).random(count).tolist()
    for percent in (0, 50, 90, 99, 100):
        assert percentile(values, percent) == pytest.approx(np.percentile(values, percent))


def test_a_spread_leaves_out_what_is_unknown() -> None:
    assert spread([None, 1.0, 3.0]) == {"mean": 2.0, "p50": 2.0, "p90": 2.8, "p99": 2.98}
    assert spread([None]) is None


def test_tokens_are_counted_by_pieces_without_usage() -> None:
    outcome = RequestOutcome(0.0, 0.0, 3.0, [1.0, 2.0, 3.0], "abc")
    assert outcome.num_tokens == 3 and outcome.tpot_s == pytest.approx(1.0)
    report = summary([outcome], Objective())
    assert report["tokens_counted_by"] == {"usage": 0, "pieces": 1} and report["prompt_tokens"] is None


def test_goodput_needs_every_objective_and_an_answer() -> None:
    both = Objective(ttft_s=1.0, tpot_s=0.5)
    assert both.met(RequestOutcome(0.0, 0.0, 2.0, [1.0, 1.5]))
    assert not both.met(RequestOutcome(0.0, 0.0, 2.0, [1.0, 1.6]))
    assert not both.met(RequestOutcome(0.0, 0.0, 2.0, [1.1, 1.2]))
    assert both.met(RequestOutcome(0.0, 0.0, 2.0, [1.0]))
    assert not both.met(RequestOutcome(0.0, 0.0, 2.0, [1.0, 1.1], error=AnswerError("cut off", "")))


# -- the whole command ------------------------------------------------------------------------------------------


def chunk(text: str, finish: str | None = None) -> bytes:
    data = {"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": finish}]}
    return f"data: {json.dumps(data, ensure_ascii=False)}\n\n".encode()


class SmallServer:
    """Answers each prompt as its last word says."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.keys: set[str | None] = set()

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "small"}]})

    async def chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        self.keys.add(request.headers.get("Authorization"))
        how = body["messages"][-1]["content"].split()[-1]
        if how == "BUSY":
            return web.json_response({"error": {"message": "come later"}}, status=429)
        if how == "WHOLE":
            return web.json_response({"choices": []})
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        async for data in self._pieces(how, body):
            await answer.write(data)
        return answer

    async def _pieces(self, how: str, body: dict[str, Any]) -> AsyncIterator[bytes]:
        first = chunk("ané")
        yield first[:-9]  # in the middle of a letter or of a name
        await asyncio.sleep(0)
        yield first[-9:]
        if how == "SLOW":
            await asyncio.sleep(30)
        if how == "CUT":
            return
        if how == "BROKEN":
            yield b'data: {"error": {"message": "engine failed"}}\n\n'
        yield chunk(" b", "length")
        words = sum(len(m["content"].split()) for m in body["messages"])
        usage = {"prompt_tokens": words + 4, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 1}}
        yield f"data: {json.dumps({'choices': [], 'usage': usage, 'forerun': {'num_steps': 2}})}\n\n".encode()
        yield b"data: [DONE]\n\n"


@contextmanager
def running(server: SmallServer) -> Iterator[str]:
    loop, started, address = asyncio.new_event_loop(), threading.Event(), list[str]()

    async def start() -> web.AppRunner:
        application = web.Application()
        application.router.add_get("/v1/models", server.models)
        application.router.add_post("/v1/chat/completions", server.chat)
        runner = web.AppRunner(application, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        address.append(f"http://127.0.0.1:{runner.addresses[0][1]}")
        return runner

    def serve() -> None:
        asyncio.set_event_loop(loop)
        runner = loop.run_until_complete(start())
        started.set()
        loop.run_forever()
        loop.run_until_complete(runner.cleanup())
        loop.close()

    thread = threading.Thread(target=serve)
    thread.start()
    assert started.wait(30)
    try:
        yield address[0]
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()


def bench(*arguments: object) -> Any:
    return CliRunner().invoke(cli, ["bench", "serve", *map(str, arguments)])


def test_the_command_measures_and_draws(tmp_path: Path) -> None:
    server, chart = SmallServer(), tmp_path / "load.svg"
    with running(server) as url:
        result = bench(
            url, "--input-len", 40, "--prefix-len", 24, "--num-requests", 6, "--concurrency", 3, "--json",
            "--api-key", "sesame", "--slo-ttft", 60, "--chart", chart, "--extra-body", '{"top_k": 1}',
        )  # fmt: skip
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["model"] == "small" and report["num_answered"] == 6 and report["errors"] == {}
    assert report["output_tokens"] == 24 and report["acceptance_length"] == 2.0
    assert report["prompt_tokens"] == 6 * (40 + 24) and report["cached_prompt_tokens"] == 6
    assert report["goodput"]["share"] == 1.0 and report["ttft_s"]["p50"] > 0
    assert report["words"] == {"per_word": 1.0, "base": 4.0, "measured": True}
    drawn = chart.read_text("utf-8")
    assert all(title in drawn for title in ("time to first text", "Time per token", "Requests", "Tokens per second"))
    measured = server.bodies[-6:]
    assert len(server.bodies) == 2 + 1 + 6 and server.keys == {"Bearer sesame"}
    assert len({body["messages"][0]["content"] for body in measured}) == 1 and "sesame" not in result.output
    assert all(body["top_k"] == 1 and body["stream_options"] == {"include_usage": True} for body in measured)


def test_the_command_counts_errors_by_kind(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    kinds = ("FINE", "BUSY", "WHOLE", "SLOW", "CUT", "BROKEN", "FINE")
    prompts.write_text("".join(json.dumps({"turns": [f"please {kind}"]}) + "\n" for kind in kinds), "utf-8")
    with running(SmallServer()) as url:
        result = bench(url, "--prompts", prompts, "--num-requests", 7, "--timeout", 1.5, "--json", "--rate", 100)
        shown = bench(url, "--prompts", prompts, "--num-requests", 2, "--no-usage")
    report = json.loads(result.stdout)
    assert {kind: error["count"] for kind, error in report["errors"].items()} == {
        "HTTP 429": 1, "not a stream": 1, "timeout": 1, "cut off": 1, "error in the stream": 1,
    }  # fmt: skip
    assert report["errors"]["HTTP 429"]["first"] == "come later" and report["num_answered"] == 2
    assert "1 failed, HTTP 429: come later" in shown.output and "1 of 2 answered" in shown.output


def test_a_chart_that_cannot_be_written_costs_no_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("forerun.cli.bench_serve._draw", fail)
    with running(SmallServer()) as url:
        result = bench(url, "--input-len", 4, "--num-requests", 2, "--chart", tmp_path / "load.svg")
    assert result.exit_code == 2 and "2 of 2 answered" in result.stdout and "chart:" not in result.stdout
    assert result.stderr.splitlines()[-1].startswith("error: output: No space left on device")


def test_nobody_there() -> None:
    with running(SmallServer()) as url:
        pass
    result = bench(url)
    assert result.exit_code == 2 and "is a server there?" in result.output

    async def ask() -> RequestOutcome:
        async with open_client(api_root(url), None, 5.0) as client:
            return await client(Ask("/completions", {}), 0.0)

    error = asyncio.run(ask()).error
    assert error is not None and error.kind == "no connection"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--endpoint", "embeddings"], "endpoint"),
        (["--rate", "0"], "rate"),
        (["--prompts", "a.jsonl", "--input-len", "3"], "give one"),
        (["--input-spread", "0.5"], "input-len"),
        (["--extra-body", "["], "JSON"),
        (["--extra-body", "[]"], "object"),
        (["--chart", "here.png"], ".svg"),
        (["--chart", "/nowhere/at/all.svg"], "folder"),
        (["telnet://x"], "address"),
    ],
)
def test_options_that_make_no_sense(arguments: list[str], says: str) -> None:
    result = bench(*arguments)
    assert result.exit_code == 2 and says in result.output, result.output


def test_words_repeat_for_the_same_key_alone() -> None:
    many: Callable[..., str] = some_words
    assert many(30, 1, "a") == many(30, 1, "a") != many(30, 1, "b")
