"""Test bed of the router: fake engines and a router, all real servers on real sockets, on the test's event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import httpx
import pytest
import uvicorn
from prometheus_client.parser import text_string_to_metric_families

from kvstore.config.router import RouterConfig
from kvstore.lab.fake_engine import FakeEngine, PromptServer
from kvstore.router.engines import EngineConfig, Role
from kvstore.router.main import router
from kvstore.rpc.http_server import HttpConnection, bind

QUICK: dict[str, Any] = {"check_interval_ms": 50, "ejection_time_ms": 100, "max_ejection_time_ms": 400}
FIRST_CHECK_ONLY: dict[str, Any] = {"check_interval_ms": 3_600_000}
"""Without further checks: an ejected engine stays ejected."""


def engine_settings(engines: Sequence[EngineConfig]) -> dict[str, Any]:
    """The settings ``engines``, ``prefill`` and ``decode`` for some engines."""
    keys = {Role.PLAIN: "engines", Role.PREFILL: "prefill", Role.DECODE: "decode"}
    found: dict[str, tuple[str, ...]] = {}
    for one in engines:
        text = f"{one.name}={one.url}@{one.node}".removesuffix("@")
        found[keys[one.role]] = (*found.get(keys[one.role], ()), text)
    return found


class Bed:
    """A router in front of fake engines."""

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

    async def states(self) -> dict[str, dict[str, Any]]:
        states: dict[str, dict[str, Any]] = (await self.http.get("/router/engines")).json()
        return states

    async def healthy(self) -> set[str]:
        return {name for name, engine in (await self.states()).items() if engine["state"] == "healthy"}

    @property
    def attempts(self) -> int:
        """Requests that reached any engine."""
        return sum(len(engine.requests) for engine in self.engines.values())


class Make:
    """Starts fake engines and routers in front of them."""

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
        """Start a second router in front of the same engines."""
        return await self._router(other.configs, other.engines, config)

    async def _router(self, configs: list[EngineConfig], engines: dict[str, FakeEngine], config: dict[str, Any]) -> Bed:
        defaults: dict[str, Any] = {"policy": "least_loaded", "metadata": None, **FIRST_CHECK_ONLY, "connect_timeout_ms": 5_000}
        made = RouterConfig(**engine_settings(configs), listen="127.0.0.1:0", **{**defaults, **config})
        http = await self._stack.enter_async_context(serving(made))
        return Bed(http, engines, configs)


@pytest.fixture
async def bed() -> AsyncIterator[Make]:
    """Starts fake engines and routers, and stops them after the test."""
    async with AsyncExitStack() as stack:
        yield Make(stack)


@asynccontextmanager
async def serving(config: RouterConfig) -> AsyncIterator[httpx.AsyncClient]:
    """A router on a socket, and a client for it."""
    listener = bind(config.listen, "router")
    async with router(config) as app:
        served = uvicorn.Config(
            app, http=HttpConnection, log_config=None, access_log=False, lifespan="off", timeout_graceful_shutdown=5
        )
        server = PromptServer(served)
        task = asyncio.create_task(server.serve(sockets=[listener]))
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        async with httpx.AsyncClient(base_url=url, timeout=30, trust_env=False) as http:
            yield http
        server.should_exit = True
        await task
