"""Entry point of a node process."""

from __future__ import annotations

import asyncio
import signal

from kvstore.node.config import NodeConfig
from kvstore.node.daemon import NodeDaemon
from kvstore.observe import tracing
from kvstore.rpc.descriptors import raise_limit


def run(config: NodeConfig) -> None:
    """Serves until SIGTERM or SIGINT, then stops in order."""
    raise_limit()
    try:
        asyncio.run(_serve(config))
    finally:
        tracing.shut_down()


async def _serve(config: NodeConfig) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    daemon = NodeDaemon(config)
    await daemon.start()
    try:
        await stop.wait()
    finally:
        await daemon.stop()
