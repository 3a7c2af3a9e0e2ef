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
from kvstore.config.router import RouterConfig
from kvstore.core.errors import InvalidArgument
from kvstore.observe.counters import Counters
from kvstore.process.fd_limits import raise_limit
from kvstore.router.context import RouterContext
from kvstore.router.engines import engines_of, health_limits
from kvstore.router.health.engine_health import EngineHealthTable
from kvstore.router.health.health_checks import HealthChecks
from kvstore.router.placement.inflight import InflightTokens
from kvstore.router.placement.local_placement import LocalPlacement
from kvstore.router.placement.placement import Placement
from kvstore.router.placement.scheduled_placement import ScheduledPlacement
from kvstore.router.prompts.prefix_lookup import StorePrefixLookup
from kvstore.router.prompts.prefix_memory import PrefixMemory
from kvstore.router.prompts.prompt_facts import PromptReader
from kvstore.router.proxy.upstream import Upstream
from kvstore.router.routes import make_app, malformed
from kvstore.rpc import http_server
from kvstore.rpc.http_server import bind

MEMORY_PIECES: Final = 65_536
"""Pieces of text remembered per engine: about 4 million tokens, 10 MB."""


def run(config: RouterConfig) -> None:
    """Serve until SIGTERM or SIGINT. Returns after requests in flight have finished, or after ``stop_grace_s``.

    Raises:
        Unavailable: the address cannot be bound.
        InvalidArgument: TLS files cannot be read.
    """
    raise_limit()
    asyncio.run(serve(config))


async def serve(config: RouterConfig) -> None:
    """Serve as ``run`` does, in a running event loop."""
    listener = bind(config.listen, "router.listen")
    async with router(config) as app:
        await http_server.serve(
            app,
            listener,
            tls=config.tls.resolve(),
            stop_grace_s=config.stop_grace_ms / 1000,
            ready_file=config.ready_file,
            malformed=malformed,
        )


@asynccontextmanager
async def router(config: RouterConfig) -> AsyncIterator[FastAPI]:
    """Run a router's background tasks within the context, and provide its application."""
    context = make_context(config)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(_close, context)
        checks = HealthChecks(context)
        stack.push_async_callback(checks.stop)
        await checks.start()
        placement: Placement = LocalPlacement(context, round_robin=config.policy == "round_robin")
        lookup: StorePrefixLookup | None = None
        if config.metadata is not None and config.policy == "scheduler":
            client = await stack.enter_async_context(
                AsyncSchedulerClient(
                    config.metadata,
                    tls=config.client.tls.resolve(),
                    options=ClientOptions(token_file=config.client.token_file),
                    counters=context.counters,
                )
            )
            placement = scheduled = ScheduledPlacement(context, client, LocalPlacement(context, round_robin=False))
            scheduled.reporter.start()
            stack.push_async_callback(scheduled.reporter.stop)
        if config.metadata is not None and config.lookup and config.policy != "round_robin":
            lookup = StorePrefixLookup(context, config.metadata, config.client.tls.resolve(), config.client.token_file)
            stack.push_async_callback(lookup.close)
            lookup.start()
        yield make_app(context, placement, PromptReader(context, lookup))


async def _close(context: RouterContext) -> None:
    """Cancel background tasks, then close all connections to engines."""
    for task in list(context.background):
        task.cancel()
    if context.background:
        await asyncio.wait(context.background)
    for upstream in context.upstreams.values():
        await upstream.close()


def make_context(config: RouterConfig) -> RouterContext:
    """Return the initial state of a router.

    Raises:
        InvalidArgument: the engines' certificates cannot be read.
    """
    engines = engines_of(config)
    names = [engine.name for engine in engines]
    verify = _engine_tls(config.engine_ca)
    return RouterContext(
        config=config,
        health=EngineHealthTable(engines, health_limits(config)),
        inflight=InflightTokens(names),
        memory=PrefixMemory(names, MEMORY_PIECES),
        upstreams={engine.name: Upstream(engine, config, verify) for engine in engines},
        counters=Counters(),
    )


def _engine_tls(ca: Path | None) -> ssl.SSLContext | bool:
    if ca is None:
        return True
    try:
        return ssl.create_default_context(cafile=str(ca))
    except (OSError, ssl.SSLError) as error:
        raise InvalidArgument("cannot read the engines' certificates (router.engine_ca)", file=ca, why=error) from error
