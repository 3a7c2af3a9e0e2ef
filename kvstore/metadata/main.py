"""Process entry of the metadata server."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Sequence
from typing import Final

from kvstore.config.metadata import MetadataConfig
from kvstore.core.errors import Unavailable
from kvstore.core.types import NamespaceId
from kvstore.metadata.server import MetadataServer
from kvstore.observe import tracing
from kvstore.observe.counters import Counters
from kvstore.observe.metric_definitions import metadata as metadata_metrics
from kvstore.process import gc_tuning
from kvstore.process.fd_limits import raise_limit
from kvstore.process.graceful_shutdown import GracefulShutdown
from kvstore.process.ready_file import write_ready_file

logger = logging.getLogger(__name__)

_SWITCH_INTERVAL_S: Final = 0.0005
"""Maximum time that the index thread holds the interpreter while a lookup waits. Python's default, 5 ms, would show in p99."""


def run(config: MetadataConfig) -> None:
    """Serve until SIGTERM or SIGINT, then stop gracefully within ``stop_grace_ms``. A second signal ends the process at once.

    Raises:
        Unavailable: the address cannot be bound, or the index cannot be opened.
        InvalidArgument: TLS files cannot be read.
    """
    raise_limit()
    asyncio.run(_serve(config))


async def _serve(config: MetadataConfig) -> None:
    """Run the server until a signal arrives.

    A damaged index is recreated while the process runs, at the same address. Nodes notice its new epoch and send their
    inventories.
    """
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    leave = asyncio.Event()
    grace_s = config.stop_grace_ms / 1000
    GracefulShutdown(grace_s, leave.set).listen()
    counters = Counters()
    namespaces: Sequence[tuple[NamespaceId, bytes]] = ()
    while True:
        server = MetadataServer(config, counters=counters, namespaces=namespaces)
        try:
            address = await server.start()
        except Unavailable:
            await asyncio.sleep(0)  # the report of damage arrives through the event loop
            if not server.damaged.is_set():
                raise
            # opening did not notice the damage, and the index is marked now: a new server drops it, or fails for good
            logger.critical("index damaged: recreating it", exc_info=True)
            server = MetadataServer(config, counters=counters, namespaces=namespaces)
            address = await server.start()
        gc_tuning.freeze_startup_objects()
        logger.info("ready on %s", address)
        if config.ready_file is not None:
            write_ready_file(config.ready_file, address=address, metrics_address=server.metrics_address)
        await _first_of(leave, server.damaged)
        namespaces = server.kept_namespaces
        await server.stop(grace_s)
        if leave.is_set():
            break
        logger.critical("index damaged or rebuild requested: recreating it")
        counters.add(metadata_metrics.INDEX_RESTARTS)
        config = config.model_copy(update={"listen": address})
    await asyncio.to_thread(tracing.shut_down)


async def _first_of(*events: asyncio.Event) -> None:
    """Wait until one of the events is set."""
    waits = [asyncio.create_task(event.wait()) for event in events]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    for wait in waits:
        wait.cancel()
