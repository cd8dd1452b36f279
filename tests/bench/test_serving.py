"""The benchmarks of the server: what they ask, what they say of it, what they fail for. No server is run here."""

from __future__ import annotations

import argparse
import asyncio
import time
from collections import Counter
from typing import Any

import hostile
import pytest
import soak
from aiohttp import web

# -- hostile ----------------------------------------------------------------------------------------------------


def test_what_hostile_clients_may_do_to_others() -> None:
    calm = {"health_worst_s": 0.2, "small_worst_s": 0.9, "looks": {"200": 7, "503": 0}, "still_running": 0}
    assert list(hostile.failures(calm, 1.0)) == []
    harmed = {"health_worst_s": 1.2, "small_worst_s": 9.0, "looks": {"200": 7, "503": 2}, "still_running": 1}
    found = list(hostile.failures({**calm, **harmed}, 1.0))
    assert found == ["health took 1.2 s", "small took 9.0 s", "2 times 503", "1 requests still run for nobody"]


@pytest.mark.parametrize("name", ["regex", "errors", "long_texts", "slow_grammar", "work_per_token", "vanishing"])
def test_every_attack_is_requests_a_server_would_read(name: str) -> None:
    asks = hostile.ATTACKS[name].asks("http://127.0.0.1:9")  # nobody listens there
    assert asks and all(ask.path in ("/v1/completions", "/v1/chat/completions", "/tokenize") for ask in asks)
    assert all(50 < len(ask.body) <= 8 << 20 for ask in asks)
    assert {ask.hangs_up for ask in asks} == {name == "vanishing"}


# A busy machine can make an innocent server slow too, so only the one that stalls is held to a short time.
@pytest.mark.parametrize(("stalls", "most_s"), [(False, 30.0), (True, 0.6)])
def test_others_are_watched_while_an_attack_lasts(stalls: bool, most_s: float) -> None:
    """A server whose event loop stands still for a moment, once, is found out."""

    async def small(request: web.Request) -> web.Response:
        if stalls and not stalled:
            stalled.append(True)
            time.sleep(0.7)
        return web.json_response({})

    async def health(request: web.Request) -> web.Response:
        return web.json_response({"running": 0, "waiting": 0})

    async def scenario() -> Any:
        app = web.Application()
        app.add_routes([web.post("/v1/completions", small), web.get("/health", health)])
        runner = web.AppRunner(app)
        await runner.setup()
        # Room for all sockets of the attack: who finds none tries again after a second.
        await web.TCPSite(runner, "127.0.0.1", 0, backlog=1024).start()
        given = argparse.Namespace(seconds=1.0, clients=1)
        try:
            return await hostile.watched(f"http://127.0.0.1:{runner.addresses[0][1]}", "m", "connections", given)
        finally:
            await runner.cleanup()

    stalled: list[bool] = []
    row = asyncio.run(scenario())
    assert row["told"]["opened"] > 0 and row["looks"]["200"] > 5
    found = list(hostile.failures(row, most_s))
    assert any(text.startswith("small took") for text in found) if stalls else not found


# -- soak -------------------------------------------------------------------------------------------------------


def samples(*rss_mib: float) -> list[dict[str, float]]:
    return [{"time_s": 10.0 * i, "rss_mib": rss, "files": 20.0} for i, rss in enumerate(rss_mib)]


def test_one_late_step_is_no_slope_and_a_leak_is_one() -> None:
    filling = [600.0 + 5 * i for i in range(20)]
    assert soak.slope_mib_per_minute(samples(*filling, *[700.0] * 17, *[715.0] * 3)) == 0.0
    leak = [700.0 + 0.5 * i for i in range(20)]
    assert soak.slope_mib_per_minute(samples(*filling, *leak)) == pytest.approx(3.0)


def test_what_a_soak_fails_for() -> None:
    given = argparse.Namespace(max_growth_mib=64.0, max_slope_mib_per_minute=1.0)
    clean: dict[str, Any] = {
        "counts": {"whole": 9, "wrong: another answer": 0},
        "statuses": {"good 200": 9, "bad 400": 3},
        "idle": True,
        "after": {"integrity": "clean", "blocks_owned": 0},
        "samples": samples(*[700.0] * 10),
        "slope_mib_per_minute": 0.2,
    }
    assert soak.failures(clean, given) == []
    broken = {
        "counts": Counter({"wrong: another answer": 1}),
        "statuses": {"bad 500": 1},
        "idle": False,
        "after": {"integrity": "block 3 is counted wrong", "blocks_owned": 2},
        "samples": samples(*[700.0] * 9, 800.0),
        "slope_mib_per_minute": 1.5,
    }
    for name, value in broken.items():
        found = soak.failures({**clean, name: value}, given)
        assert len(found) == (2 if name == "after" else 1), (name, found)
