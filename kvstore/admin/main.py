"""Process entry of the admin server."""

from __future__ import annotations

import asyncio
import os
from typing import Final

from kvstore.admin.app import make_app
from kvstore.config.admin import AdminConfig
from kvstore.control_api.store_rpc import StoreEndpoint, StoreRpc
from kvstore.observe.counters import Counters
from kvstore.process.fd_limits import raise_limit
from kvstore.rpc import http_server
from kvstore.rpc.auth.tokens import TokenSource, tokens_file

NICENESS: Final = 10
"""The admin server yields its CPU to engines and daemons on the host."""


def run(config: AdminConfig) -> None:
    """Serve until SIGTERM or SIGINT, then finish the requests in flight within ``stop_grace``.

    Raises:
        Unavailable: the address cannot be bound.
        InvalidArgument: a tokens or TLS file cannot be read.
    """
    raise_limit()
    os.nice(NICENESS)
    asyncio.run(_serve(config))


def store_endpoint(config: AdminConfig) -> StoreEndpoint:
    """Return the endpoint and credentials with which the admin server connects to the store.

    Raises:
        InvalidArgument: a token file cannot be read.
    """
    client = config.client
    return StoreEndpoint(
        metadata=config.metadata,
        tls=client.tls.resolve(),
        token=TokenSource.of(file=client.token_file),
        read_token=TokenSource.of(file=client.read_token_file),
        timeout_s=config.timeout_ms / 1000,
        change_timeout_s=config.change_timeout_ms / 1000,
    )


async def _serve(config: AdminConfig) -> None:
    tokens = None if config.tokens_file is None else await asyncio.to_thread(tokens_file, config.tokens_file)
    listener = http_server.bind(config.listen, "admin.listen")
    counters = Counters()
    rpc = StoreRpc(store_endpoint(config), counters)
    app = make_app(rpc, config, tokens, counters)
    try:
        await http_server.serve(
            app,
            listener,
            tls=config.tls.resolve(),
            stop_grace_s=config.stop_grace_ms / 1000,
            ready_file=config.ready_file,
            malformed=app.malformed,
        )
    finally:
        await rpc.close()
