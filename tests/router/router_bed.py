"""What router tests share: fake engines and a router, all real servers on real sockets, on the test's event loop."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from typing import Any

import httpx
import pytest
import uvicorn

from kvstore.router.config import EngineConfig, HealthLimits, Role, RouterConfig
from kvstore.router.main import router
from kvstore.testing.fake_engine import FakeEngine

QUICK = HealthLimits(interval_s=0.05, timeout_s=2.0, failed_checks=2, failed_requests=3, eject_s=0.1, eject_most_s=0.4)
NEVER = HealthLimits(interval_s=3600.0)
"""Only the first check, so that a test decides what is noticed."""


class Bed:
    """A router before fake engines."""

    def __init__(self, http: httpx.AsyncClient, engines: dict[str, FakeEngine]) -> None:
        self.http = http
        self.engines = engines

    def __getitem__(self, name: str) -> FakeEngine:
        return self.engines[name]

    async def complete(self, prompt: str = "one two three", **fields: Any) -> httpx.Response:
        return await self.http.post("/v1/completions", json={"model": "m", "prompt": prompt, **fields})

    async def counter(self, name: str) -> int:
        text = (await self.http.get("/metrics")).text
        return next((int(line.split()[1]) for line in text.splitlines() if line.startswith(f"kvstore_{name} ")), 0)

    async def up(self) -> set[str]:
        return {name for name, engine in (await self.http.get("/router/engines")).json().items() if engine["up"]}


Make = Callable[..., Awaitable[Bed]]


@pytest.fixture
async def bed() -> AsyncIterator[Make]:
    """Starts fake engines and a router before them; ends all with the test."""
    async with AsyncExitStack() as stack:

        async def make(
            *names: str,
            prefill: tuple[str, ...] = (),
            decode: tuple[str, ...] = (),
            models: tuple[str, ...] = ("m",),
            **config: Any,
        ) -> Bed:
            roles = {
                **dict.fromkeys(names, Role.PLAIN),
                **dict.fromkeys(prefill, Role.PREFILL),
                **dict.fromkeys(decode, Role.DECODE),
            }
            engines = {name: await stack.enter_async_context(FakeEngine(name, models=models)) for name in roles}
            configs = [EngineConfig(name, engine.url, roles[name], f"node-{name}") for name, engine in engines.items()]
            settings: dict[str, Any] = {"policy": "least_loaded", "health": NEVER, "connect_timeout_s": 5.0, **config}
            http = await stack.enter_async_context(serving(RouterConfig(configs, listen="127.0.0.1:0", **settings)))
            return Bed(http, engines)

        yield make


@asynccontextmanager
async def serving(config: RouterConfig) -> AsyncIterator[httpx.AsyncClient]:
    """A router on a socket, and a client of it."""
    door = socket.socket()
    door.bind(("127.0.0.1", 0))
    door.listen(256)
    async with router(config) as app:
        server = _Quiet(uvicorn.Config(app, log_config=None, access_log=False, lifespan="off", timeout_graceful_shutdown=5))
        task = asyncio.create_task(server.serve(sockets=[door]))
        url = f"http://127.0.0.1:{door.getsockname()[1]}"
        async with httpx.AsyncClient(base_url=url, timeout=30, trust_env=False) as http:
            yield http
        server.should_exit = True
        await task


class _Quiet(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def until(condition: Callable[[], Awaitable[bool]], what: str) -> None:
    """Polls until a condition holds; fails after a generous bound."""
    try:
        async with asyncio.timeout(20):
            while not await condition():  # noqa: ASYNC110  # what is waited for happens in a server that tells nobody
                await asyncio.sleep(0.01)
    except TimeoutError:
        pytest.fail(f"not in time: {what}")
