"""What a publisher of KV events is told."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from kvstore.core import limits
from kvstore.core.errors import InvalidArgument
from kvstore.core.types import NamespaceId, NodeId, Tier
from kvstore.process.tls import TlsConfig
from kvstore.rpc.address import check_address, check_metrics_address, stays_on_host
from kvstore.rpc.auth.tokens import TokenSource

_ENDPOINT: Final = re.compile(r"(?P<kind>tcp|ipc)://(?P<rest>.+)")

Hashes = Literal["int64", "bytes"]


@dataclass(frozen=True, slots=True)
class EventsConfig:
    """One stream of events in vLLM's format.

    Args:
        metadata: address of the metadata server.
        endpoint: of the PUB socket: ``tcp://HOST:PORT`` or ``ipc://PATH``.
        connect: connect to a SUB socket that others have bound, instead of binding.
        replay: endpoint of the ROUTER socket that answers who missed something; None: nobody does. Always bound.
        topic: first frame of each message.
        hashes: what stands for a block: the last eight bytes of its key as a big-endian number, as vLLM does it unless told
            otherwise, or the whole key.
        namespaces: blocks of these alone; none: of all.
        nodes: volumes of these nodes alone; none: of all.
        tiers: volumes of these tiers alone; none: of all.
        rank: ``data_parallel_rank`` in each batch.
        replay_batches: the most past batches that are kept for replay.
        replay_bytes: the most memory that they may take.
        high_water: messages that wait for a slow subscriber; it misses later ones, and may have them replayed.
        heartbeat_s: an empty batch goes out after so long without any, so that who missed the last one notices.
        first: number of the first batch; None: the clock's microseconds, so that a publisher that was started again leaves a gap
            in the numbers, which its subscribers have replayed like any other.
        tls: as for every channel to the metadata server.
        token: what it is shown; None: nothing.
        metrics_listen: address of ``/metrics``; None: not served.
        ready_file: written as JSON ``{"zmq", "replay", "pid"}`` once the first snapshot is published.
        allow_insecure_remote: bind where other hosts can reach it: ZeroMQ has no TLS here and checks nobody.

    Raises:
        InvalidArgument: a value that cannot work, or an open door that nobody asked for.
    """

    metadata: str
    endpoint: str
    connect: bool = False
    replay: str | None = None
    topic: str = ""
    hashes: Hashes = "int64"
    namespaces: Sequence[NamespaceId] = ()
    nodes: Sequence[NodeId] = ()
    tiers: Sequence[Tier] = ()
    rank: int = 0
    replay_batches: int = 10_000
    replay_bytes: int = 64 << 20
    high_water: int = 1_000
    heartbeat_s: float = 5.0
    first: int | None = None
    tls: TlsConfig | None = None
    token: TokenSource | None = None
    metrics_listen: str | None = None
    ready_file: Path | None = None
    allow_insecure_remote: bool = False

    def __post_init__(self) -> None:
        check_address(self.metadata)
        for endpoint, binds in ((self.endpoint, not self.connect), (self.replay, True)):
            if endpoint is not None:
                self._check(endpoint, binds=binds)
        if len(self.topic.encode()) > limits.MAX_NAME_BYTES:
            raise InvalidArgument("a topic is too long", limit=limits.MAX_NAME_BYTES)
        if min(self.replay_batches, self.replay_bytes, self.high_water) < 1 or self.heartbeat_s <= 0:
            raise InvalidArgument("replay and subscribers take room for one batch at least, and some time between heartbeats")
        check_metrics_address(self.metrics_listen, allow_remote=self.allow_insecure_remote)

    def _check(self, endpoint: str, *, binds: bool) -> None:
        found = _ENDPOINT.fullmatch(endpoint)
        if found is None:
            raise InvalidArgument("an endpoint is tcp://HOST:PORT or ipc://PATH", got=endpoint)
        if found["kind"] == "ipc" or (not binds and "*" not in endpoint):
            return
        host, _, port = found["rest"].rpartition(":")
        if not binds:
            raise InvalidArgument("nobody can connect to all addresses: name one, or bind", got=endpoint)
        local = host != "*" and stays_on_host(f"{host}:{0 if port == '*' else port}")
        if not local and not self.allow_insecure_remote:
            raise InvalidArgument(
                "refusing to publish beyond this host: ZeroMQ is plain and checks nobody; to do so set allow_insecure_remote",
                endpoint=endpoint,
            )
