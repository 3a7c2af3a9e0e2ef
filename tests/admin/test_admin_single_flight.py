"""Concurrent equal queries to the admin server become one query to the store."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from kvstore.admin.middleware import MAX_AGE, AdminMiddleware
from kvstore.admin.single_flight import SingleFlight
from kvstore.config.admin import AdminConfig
from kvstore.observe.counters import Counters


class SlowApp:
    """An application whose responses wait until ``release`` is set, and count its executions."""

    def __init__(self) -> None:
        self.executions: list[str] = []
        self.status = 200
        self.release = asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.executions.append(f"{scope['method']} {scope['path']}")
        number = len(self.executions)
        if scope["method"] == "GET":
            await self.release.wait()
        await send({"type": "http.response.start", "status": self.status, "headers": [(b"etag", b"x")]})
        await send({"type": "http.response.body", "body": b"%d" % number, "more_body": True})
        await send({"type": "http.response.body", "body": b"."})


def client_of(app: SlowApp, counters: Counters) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(AdminMiddleware(app, AdminConfig(), None, counters))  # type: ignore[arg-type]
    return httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:7470")


async def executions(app: SlowApp, count: int) -> None:
    while len(app.executions) < count:  # noqa: ASYNC110  # the application is the one that counts
        await asyncio.sleep(0)
    for _ in range(100):
        await asyncio.sleep(0)


async def test_admin_50_equal_queries_execute_once() -> None:
    app, counters = SlowApp(), Counters()
    async with client_of(app, counters) as client:
        asked = [asyncio.create_task(client.get("/v1/nodes", headers={"x-request-id": f"r{n}"})) for n in range(50)]
        await executions(app, 1)
        app.release.set()
        answers = await asyncio.gather(*asked)
    assert app.executions == ["GET /v1/nodes"]
    assert {answer.text for answer in answers} == {"1."}
    assert [answer.headers.get_list("x-request-id") for answer in answers] == [[f"r{n}"] for n in range(50)]
    assert {answer.headers["etag"] for answer in answers} == {"x"}
    assert {answer.headers["cache-control"] for answer in answers} == {MAX_AGE}
    assert counters.snapshot()["admin_requests_shared_total"] == 49


async def test_admin_later_or_different_queries_execute_again() -> None:
    app = SlowApp()
    app.release.set()
    async with client_of(app, Counters()) as client:
        found = [(await client.get(path)).text for path in ("/v1/nodes", "/v1/nodes", "/v1/nodes?limit=1", "/v1/volumes")]
    assert found == ["1.", "2.", "3.", "4."]


async def test_admin_query_after_change_executes_again() -> None:
    app = SlowApp()
    async with client_of(app, Counters()) as client:
        before = asyncio.create_task(client.get("/v1/nodes"))
        await executions(app, 1)
        await client.post("/v1/nodes/a/undrain")
        after = asyncio.create_task(client.get("/v1/nodes"))
        await executions(app, 3)
        app.release.set()
        assert [(await before).text, (await after).text] == ["1.", "3."]


async def test_admin_shared_error_is_not_cacheable() -> None:
    app = SlowApp()
    app.status = 503
    app.release.set()
    async with client_of(app, Counters()) as client:
        assert (await client.get("/v1/nodes")).headers["cache-control"] == "no-store"


async def test_single_flight_caller_cancelled_others_answered() -> None:
    flights: SingleFlight[str, int] = SingleFlight()
    release = asyncio.Event()

    async def execute() -> int:
        await release.wait()
        return 7

    first, second = (asyncio.create_task(flights.run("a", execute)) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    release.set()
    assert await second == (7, True)


async def test_single_flight_error_reaches_every_caller() -> None:
    flights: SingleFlight[str, int] = SingleFlight()

    async def execute() -> int:
        await asyncio.sleep(0)
        raise KeyError("x")

    found = await asyncio.gather(*(flights.run("a", execute) for _ in range(3)), return_exceptions=True)
    assert [type(one) for one in found] == [KeyError] * 3
