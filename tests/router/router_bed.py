"""What router tests share: fake engines and a router, all real servers on real sockets, on the test's event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from typing import Any

import httpx
import pytest
import uvicorn
from prometheus_client.parser import text_string_to_metric_families

from kvstore.router.config import EngineConfig, HealthLimits, Role, RouterConfig
from kvstore.router.main import router
from kvstore.rpc.http_server import Connection, bind
from kvstore.testing.fake_engine import FakeEngine

QUICK = HealthLimits(interval_s=0.05, timeout_s=2.0, failed_checks=2, failed_requests=3, eject_s=0.1, eject_most_s=0.4)
NEVER = HealthLimits(interval_s=3600.0)
"""Only the first check, so that a test decides what is noticed."""


class Bed:
    """A router before fake engines."""

    def __init__(self, http: httpx.AsyncClient, engines: dict[str, FakeEngine], configs: list[EngineConfig]) -> None:
        self.http = http
        self.engines = engines
        self.configs = configs

    def __getitem__(self, name: str) -> FakeEngine:
        return self.engines[name]

    async def complete(self, prompt: str = "one two three", **fields: Any) -> httpx.Response:
        return await self.http.post("/v1/completions", json={"model": "m", "prompt": prompt, **fields})

    async def counter(self, name: str, **labels: str) -> int:
        families = text_string_to_metric_families((await self.http.get("/metrics")).text)
        samples = [sample for family in families for sample in family.samples]
        return next((int(one.value) for one in samples if (one.name, one.labels) == (f"kvstore_{name}", labels)), 0)

    async def up(self) -> set[str]:
        return {name for name, engine in (await self.http.get("/router/engines")).json().items() if engine["up"]}


class Make:
    """Starts fake engines and routers before them."""

    def __init__(self, stack: AsyncExitStack) -> None:
        self._stack = stack

    async def __call__(
        self,
        *names: str,
        prefill: tuple[str, ...] = (),
        decode: tuple[str, ...] = (),
        models: tuple[str, ...] = ("m",),
        **config: Any,
    ) -> Bed:
        roles = dict.fromkeys(names, Role.PLAIN)
        roles |= dict.fromkeys(prefill, Role.PREFILL) | dict.fromkeys(decode, Role.DECODE)
        engines = {name: await self._stack.enter_async_context(FakeEngine(name, models=models)) for name in roles}
        configs = [EngineConfig(name, engine.url, roles[name], f"node-{name}") for name, engine in engines.items()]
        return await self._router(configs, engines, config)

    async def beside(self, other: Bed, **config: Any) -> Bed:
        """A second router before another's engines."""
        return await self._router(other.configs, other.engines, config)

    async def _router(self, configs: list[EngineConfig], engines: dict[str, FakeEngine], config: dict[str, Any]) -> Bed:
        settings: dict[str, Any] = {"policy": "least_loaded", "health": NEVER, "connect_timeout_s": 5.0, **config}
        http = await self._stack.enter_async_context(serving(RouterConfig(configs, listen="127.0.0.1:0", **settings)))
        return Bed(http, engines, configs)


@pytest.fixture
async def bed() -> AsyncIterator[Make]:
    """Starts fake engines and routers; ends all with the test."""
    async with AsyncExitStack() as stack:
        yield Make(stack)


@asynccontextmanager
async def serving(config: RouterConfig) -> AsyncIterator[httpx.AsyncClient]:
    """A router on a socket, and a client of it."""
    door = bind(config.listen, "router")
    async with router(config) as app:
        served = uvicorn.Config(
            app, http=Connection, log_config=None, access_log=False, lifespan="off", timeout_graceful_shutdown=5
        )
        server = _Quiet(served)
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
