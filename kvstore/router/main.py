"""Process entry of the router."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import socket
import ssl
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Final

import uvicorn
from fastapi import FastAPI

from kvclient import AsyncSchedulerClient
from kvstore.core.errors import InvalidArgument, Unavailable
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
from kvstore.router.service import make_app
from kvstore.router.store_index import KVStoreIndex
from kvstore.router.upstream import Upstream
from kvstore.rpc.descriptors import raise_limit

logger = logging.getLogger(__name__)

MEMORY_PIECES: Final = 65_536
"""Pieces of text remembered of each engine: some 4 million tokens, about 10 MB."""
_BACKLOG: Final = 2_048
_KEEP_ALIVE_S: Final = 75


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
    door = _bind(config.listen)
    address = "{}:{}".format(*door.getsockname()[:2])
    async with router(config) as app:
        server = _Server(_uvicorn_config(config, app), config.ready_file, address)
        await server.serve(sockets=[door])


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
            client = await stack.enter_async_context(AsyncSchedulerClient(config.metadata, tls=config.tls))
            placement = scheduled = ScheduledPlacement(parts, client, LocalPlacement(parts, round_robin=False))
            scheduled.reporter.start()
            stack.push_async_callback(scheduled.reporter.stop)
        if config.metadata is not None and config.lookup and config.policy != "round_robin":
            index = KVStoreIndex(parts, config.metadata, config.tls)
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


class _Server(uvicorn.Server):
    """Tells whoever waits that requests are answered: on the log, and in a file if one is named."""

    def __init__(self, config: uvicorn.Config, ready_file: Path | None, address: str) -> None:
        super().__init__(config)
        self._ready_file = ready_file
        self._address = address

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """SIGTERM and SIGINT end it in order, and are not raised again afterwards, as uvicorn's own way would."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.handle_exit, number, None)
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if not self.started:
            return
        logger.info("ready on %s", self._address)
        if self._ready_file is not None:
            scratch = self._ready_file.with_name(f".{self._ready_file.name}.{os.getpid()}")
            scratch.write_text(json.dumps({"address": self._address, "pid": os.getpid()}))
            scratch.replace(self._ready_file)


def _uvicorn_config(config: RouterConfig, app: FastAPI) -> uvicorn.Config:
    tls = config.serve_tls
    if tls is not None and (tls.cert is None or tls.key is None):
        raise InvalidArgument("to serve TLS, a router takes a certificate and its key")
    return uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        lifespan="off",
        server_header=False,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=max(1, int(config.stop_grace_s)),
        ssl_certfile=None if tls is None else tls.cert,
        ssl_keyfile=None if tls is None else tls.key,
        ssl_ca_certs=None if tls is None or tls.ca is None else str(tls.ca),
        ssl_cert_reqs=ssl.CERT_REQUIRED if tls is not None and tls.require_client_cert else ssl.CERT_NONE,
    )


def _engine_tls(ca: Path | None) -> ssl.SSLContext | bool:
    if ca is None:
        return True
    try:
        return ssl.create_default_context(cafile=str(ca))
    except (OSError, ssl.SSLError) as error:
        raise InvalidArgument("the engines' certificates cannot be read", file=ca, why=error) from error


def _bind(listen: str) -> socket.socket:
    """The listening socket.

    Raises:
        Unavailable: it cannot be bound.
    """
    host, _, port = listen.rpartition(":")
    host = host.strip("[]")
    # the protocol is named, or asyncio does not know it for TCP and leaves Nagle's delays on: 40 ms a piece
    door = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        door.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        door.bind((host, int(port)))
        door.listen(_BACKLOG)
    except OSError as error:
        door.close()
        raise Unavailable("the router's address cannot be bound", listen=listen, why=error) from error
    return door
