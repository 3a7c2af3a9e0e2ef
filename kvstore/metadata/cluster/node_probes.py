"""Probes of nodes whose heartbeats do not arrive: has the process ended, does it hang, or is its host cut off?

A probe connects to the node's registered gRPC address and sends the first bytes of a client: an HTTP/2 preface, or a TLS hello.
Any answer, even an alert or the end of the connection, proves that the process runs. A suspended process does not answer,
although the kernel accepts the connection for it. A probe sends no credentials and reads one byte.
"""

from __future__ import annotations

import asyncio
import errno
import math
import ssl
from collections.abc import Mapping
from contextlib import suppress
from typing import Final

from kvstore.core.clock import Clock
from kvstore.health.node_reachability import Reachability
from kvstore.rpc.address import host_and_port

TIMEOUT_S: Final = 1.0
"""For the connection, and again for the answer."""
INTERVAL_S: Final = 2.0
"""Minimum interval between two probes of a node."""
_AT_ONCE: Final = 32
_PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
_NO_ROUTE: Final = {errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ENETDOWN, errno.ETIMEDOUT}


async def probe(address: str, *, tls: bool, timeout_s: float = TIMEOUT_S) -> Reachability:
    """Connect to a node and wait for an answer. Raises nothing that an address or a server causes.

    Args:
        address: ``"host:port"``; any other text is not probed.
        tls: whether the node serves TLS.
        timeout_s: for the connection, and again for the answer.
    """
    try:
        host, port = host_and_port(address)
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_connection(host, port)
    except ConnectionRefusedError:
        return Reachability.REFUSED
    except TimeoutError:
        return Reachability.UNREACHABLE
    except OSError as error:
        return Reachability.UNREACHABLE if error.errno in _NO_ROUTE else Reachability.NOT_PROBED
    except ValueError:  # no address, or no name of a host, such as "a..b"
        return Reachability.NOT_PROBED
    try:
        writer.write(_tls_hello() if tls else _PREFACE)
        async with asyncio.timeout(timeout_s):
            await reader.read(1)  # empty: the process has closed the connection
    except TimeoutError:
        return Reachability.NO_ANSWER
    except OSError:
        return Reachability.ANSWERS  # reset by the process
    finally:
        writer.close()
    return Reachability.ANSWERS


def _tls_hello() -> bytes:
    """Return the first message of a TLS handshake."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # nothing is sent after the hello
    context.set_alpn_protocols(["h2"])
    outgoing = ssl.MemoryBIO()
    with suppress(ssl.SSLWantReadError):
        context.wrap_bio(ssl.MemoryBIO(), outgoing).do_handshake()
    return outgoing.read()


class NodeProbes:
    """The last probe of each silent node. Use on one event loop.

    Args:
        clock: time.
        tls: whether nodes serve TLS.
    """

    def __init__(self, clock: Clock, *, tls: bool) -> None:
        self._clock = clock
        self._tls = tls
        self._found: dict[str, tuple[float, str, Reachability]] = {}

    def found(self, node_id: str) -> Reachability:
        """Return the result of the last probe of a silent node."""
        known = self._found.get(node_id)
        return Reachability.NOT_PROBED if known is None else known[2]

    async def refresh(self, silent: Mapping[str, str]) -> None:
        """Probe silent nodes whose last probe is old, the oldest first, and forget all other nodes.

        Args:
            silent: addresses of the silent nodes by id.
        """
        self._found = {node_id: known for node_id, known in self._found.items() if silent.get(node_id) == known[1]}
        now_s = self._clock.now_s()
        due = [node_id for node_id in silent if node_id not in self._found or now_s - self._found[node_id][0] >= INTERVAL_S]

        async def one(node_id: str) -> None:
            result = await probe(silent[node_id], tls=self._tls)
            self._found[node_id] = now_s, silent[node_id], result

        due.sort(key=lambda node_id: self._found[node_id][0] if node_id in self._found else -math.inf)
        await asyncio.gather(*(one(node_id) for node_id in due[:_AT_ONCE]))
