"""Process entry of the router."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Final

from fastapi import FastAPI

from kvclient import AsyncSchedulerClient, ClientOptions
from kvstore.core.errors import InvalidArgument
from kvstore.observe.counters import Counters
from kvstore.router.config import RouterConfig
from kvstore.router.health import HealthChecks
from kvstore.router.ledger import Ledger
from kvstore.router.local_placement import LocalPlacement
from kvstore.router.parts import Parts, Placement
from kvstore.router.pool import Pool
from kvstore.router.prefix_memory import PrefixMemory
from kvstore.router.prompts import PromptReader
from kvstore.router.scheduled_placement import ScheduledPlacement
from kvstore.router.service import make_app, malformed
from kvstore.router.store_index import KVStoreIndex
from kvstore.router.upstream import Upstream
from kvstore.rpc import http_server
from kvstore.rpc.descriptors import raise_limit
from kvstore.rpc.http_server import bind

MEMORY_PIECES: Final = 65_536
"""Pieces of text remembered of each engine: some 4 million tokens, about 10 MB."""


def run(config: RouterConfig) -> None:
    """Serves until SIGTERM or SIGINT; returns after requests under way have ended, or their grace has.

    Raises:
        Unavailable: the address cannot be bound.
        InvalidArgument: TLS files that cannot be read.
    """
    raise_limit()
    asyncio.run(serve(config))


async def serve(config: RouterConfig) -> None:
    """As ``run``, in a running loop."""
    door = bind(config.listen, "router.listen")
    async with router(config) as app:
        await http_server.serve(
            app,
            door,
            tls=config.serve_tls,
            stop_grace_s=config.stop_grace_s,
            ready_file=config.ready_file,
            malformed=malformed,
        )


@asynccontextmanager
async def router(config: RouterConfig) -> AsyncIterator[FastAPI]:
    """A router's application, with all that runs behind it as long as the context lasts."""
    parts = make_parts(config)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(_close, parts)
        checks = HealthChecks(parts)
        stack.push_async_callback(checks.stop)
        await checks.start()
        placement: Placement = LocalPlacement(parts, round_robin=config.policy == "round_robin")
        index: KVStoreIndex | None = None
        if config.metadata is not None and config.policy == "scheduler":
            client = await stack.enter_async_context(
                AsyncSchedulerClient(config.metadata, tls=config.tls, options=ClientOptions(token_file=config.token_file))
            )
            placement = scheduled = ScheduledPlacement(parts, client, LocalPlacement(parts, round_robin=False))
            scheduled.reporter.start()
            stack.push_async_callback(scheduled.reporter.stop)
        if config.metadata is not None and config.lookup and config.policy != "round_robin":
            index = KVStoreIndex(parts, config.metadata, config.tls, config.token_file)
            stack.push_async_callback(index.close)
            index.start()
        yield make_app(parts, placement, PromptReader(parts, index))


async def _close(parts: Parts) -> None:
    """Ends what requests have left running, then the connections."""
    for work in list(parts.running):
        work.cancel()
    if parts.running:
        await asyncio.wait(parts.running)
    for upstream in parts.upstreams.values():
        await upstream.close()


def make_parts(config: RouterConfig) -> Parts:
    """The state of a router that begins.

    Raises:
        InvalidArgument: the engines' certificates cannot be read.
    """
    names = [engine.name for engine in config.engines]
    verify = _engine_tls(config.engine_tls_ca)
    return Parts(
        config=config,
        pool=Pool(config.engines, config.health),
        ledger=Ledger(names),
        memory=PrefixMemory(names, MEMORY_PIECES),
        upstreams={engine.name: Upstream(engine, config, verify) for engine in config.engines},
        counters=Counters(),
    )


def _engine_tls(ca: Path | None) -> ssl.SSLContext | bool:
    if ca is None:
        return True
    try:
        return ssl.create_default_context(cafile=str(ca))
    except (OSError, ssl.SSLError) as error:
        raise InvalidArgument("the engines' certificates cannot be read", file=ca, why=error) from error
