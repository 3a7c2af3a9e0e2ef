"""Entry point of a node process."""

from __future__ import annotations

import asyncio

from kvstore.config.node import NodeConfig
from kvstore.node.daemon import NodeDaemon
from kvstore.observe import tracing
from kvstore.process.fd_limits import raise_limit
from kvstore.process.graceful_shutdown import GracefulShutdown, exit_now


def run(config: NodeConfig) -> None:
    """Serve until SIGTERM or SIGINT, then stop gracefully within ``stop_grace_s``. A second signal stops at once."""
    raise_limit()
    try:
        asyncio.run(_serve(config))
    finally:
        tracing.shut_down()


async def _serve(config: NodeConfig) -> None:
    stop = asyncio.Event()
    leaving = GracefulShutdown(config.stop_grace_ms / 1000, stop.set)
    leaving.listen()
    daemon = NodeDaemon(config)
    await daemon.start()
    try:
        await stop.wait()
    finally:
        leaving.begin()
        await daemon.stop()
        if daemon.hung:  # otherwise the interpreter would wait for the threads of that I/O
            tracing.shut_down()
            exit_now(0)
