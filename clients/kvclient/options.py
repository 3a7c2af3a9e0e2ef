"""What a caller may choose about a client. Every wait and every queue has its bound here; no time is longer than a day."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from kvclient.call.arguments import check_seconds
from kvstore.core.errors import InvalidArgument
from kvstore.rpc.address import check_metrics_address
from kvstore.rpc.auth.tokens import TokenSource
from kvstore.transport.nixl.agent import NEEDS_TRUST, NixlOptions
from kvstore.transport.shaping.socket_marking import CS1
from kvstore.transport.shaping.traffic import TrafficClass

Verify = Literal["auto", "always", "never"]
"""When the client itself checks checksums of what it loads.

``auto``: what came over a wire to this process; bytes out of the local node's arena were checked by the node where they
came from a wire or a disk, and are checked here where others than that node may write to its arena
(``node.nixl``). ``always``: also after the copy out of the arena. ``never``: not even over a wire (benchmarks).
"""

VERIFY_CHOICES: tuple[Verify, ...] = ("auto", "always", "never")


@dataclass(frozen=True, slots=True)
class ClientOptions:
    """Bounds and choices of one client.

    Attributes:
        client_name: how nodes call this client in logs and statistics.
        default_deadline_s: bound of a load or store that brings none of its own.
        lookup_deadline_s: bound of a lookup that brings none of its own; a lookup inside a load takes part of the load's time.
        connect_deadline_s: bound of ``connect``, all its steps together (but for asking where the node is, which may add
            ``lookup_deadline_s``), and of opening a session anew.
        strict: raise failures of ours instead of answering misses and skips. For tests: an engine wants False.
        require_store: ``connect`` raises where metadata server or named node do not answer; False: it goes on without,
            and everything is a miss until they do.
        verify: default of ``load``.
        local_roles: with ``node="auto"``: preferred roles where several nodes run on this host, best first.
        store_node: without a local node: the node id that stores go to; None: the first living one by ``store_roles``.
        store_roles: preferred roles of that node, best first.
        room_wait_s: a store waits at most so long for room in the local node, each chunk; then it is skipped.
        store_chunk_bytes: a store asks for slots for about so many bytes at a time.
        load_chunk_bytes: a load asks the local node for about so many bytes at a time: they must be copied within one lease.
        release_bytes: leases that loads have done with go back at once when they hold so many bytes, else after milliseconds.
        copy_chunk_bytes: between two looks at the deadline and at a cancellation, at most about so many bytes are copied.
        lease_margin_s: how long before its nominal end a lease is taken to be over.
        layer_group: without a local node: layers that arrive together in a layer-wise load.
        workers: threads for loads and stores that run in the background (``start_load``, asyncio).
        max_pending: background operations that may wait or run at once; one more is answered as a miss or skip.
        read_streams: nodes read from at once, in the whole client.
        part_workers: parts of planned loads under way at once, in the whole client; more wait for their turn.
        tcp_streams: connections to each node.
        kv_dscp: mark of KV traffic (DSCP), 0 to 63; 8 is CS1, a low class; 0: unmarked.
        compute_cap: the most bytes a second that this process's client moves to and from other hosts, each direction; 0: no cap.
        nixl: bytes from nodes that have it by one-sided transfers, where there is no TLS and no cap; None: over TCP.
        nixl_trusted_network: needed for ``nixl``: whoever reaches this process's ports may read and write its memory and end it.
        breaker_failures: unanswered calls in a row after which calls to the metadata server fail at once.
        breaker_pause_s: how long, until one call is let through to probe.
        reopen_pause_s: least time between two attempts to open a lost session anew.
        log_interval_s: each kind of failure is logged at most once in so many seconds.
        slow_load_s: a load that takes longer is logged with its breakdown.
        metrics_listen: address, ``host:port``, of ``/metrics`` and ``/loads`` of this client over plain HTTP, on this host; None:
            not served. In an engine that shows metrics of its own, ``kvclient.metrics.collector`` joins those instead.
        token: shown to metadata server and nodes with every call; never printed or logged. Empty: nothing is shown.
        token_file: a file that holds it instead; it may change.
    """

    client_name: str = "kvclient"
    default_deadline_s: float = 10.0
    lookup_deadline_s: float = 1.0
    connect_deadline_s: float = 10.0
    strict: bool = False
    require_store: bool = True
    verify: Verify = "auto"
    local_roles: tuple[str, ...] = ("prefill", "decode", "storage")
    store_node: str | None = None
    store_roles: tuple[str, ...] = ("storage", "prefill", "decode")
    room_wait_s: float = 2.0
    store_chunk_bytes: int = 256 << 20
    load_chunk_bytes: int = 1 << 30
    release_bytes: int = 64 << 20
    copy_chunk_bytes: int = 64 << 20
    lease_margin_s: float = 0.05
    layer_group: int = 1
    workers: int = 4
    max_pending: int = 64
    read_streams: int = 8
    part_workers: int = 64
    tcp_streams: int = 4
    kv_dscp: int = CS1
    compute_cap: int = 0
    nixl: NixlOptions | None = None
    nixl_trusted_network: bool = False
    breaker_failures: int = 3
    breaker_pause_s: float = 1.0
    reopen_pause_s: float = 0.25
    log_interval_s: float = 10.0
    slow_load_s: float = 1.0
    metrics_listen: str | None = None
    token: str = field(default="", repr=False)
    token_file: Path | None = None

    def __post_init__(self) -> None:
        positive = (
            "store_chunk_bytes",
            "release_bytes",
            "copy_chunk_bytes",
            "layer_group",
            "workers",
            "max_pending",
            "read_streams",
            "tcp_streams",
            "part_workers",
            "load_chunk_bytes",
            "breaker_failures",
        )
        for name in positive:
            if not isinstance(getattr(self, name), int) or getattr(self, name) <= 0:
                raise InvalidArgument("the option takes an integer above 0", option=name, value=getattr(self, name))
        for name in ("default_deadline_s", "lookup_deadline_s", "connect_deadline_s", "breaker_pause_s", "reopen_pause_s"):
            object.__setattr__(self, name, check_seconds(name, getattr(self, name)))
        for name in ("room_wait_s", "lease_margin_s", "log_interval_s", "slow_load_s"):
            object.__setattr__(self, name, check_seconds(name, getattr(self, name), zero=True))
        check_metrics_address(self.metrics_listen, allow_remote=False)
        self.shown_token()
        self.traffic_class()
        if self.nixl is not None and not self.nixl_trusted_network:
            raise InvalidArgument(NEEDS_TRUST, option="nixl", needs="nixl_trusted_network=True")
        if self.verify not in VERIFY_CHOICES:
            raise InvalidArgument("unknown choice", option="verify", value=self.verify, choices=VERIFY_CHOICES)

    def shown_token(self) -> TokenSource | None:
        """The token for a channel; None: there is none.

        Raises:
            InvalidArgument: given twice, cannot be read, or no token.
        """
        return TokenSource.of(self.token, self.token_file)

    def traffic_class(self) -> TrafficClass:
        """The class of this client's KV traffic.

        Raises:
            InvalidArgument: ``kv_dscp`` or ``compute_cap`` is out of bounds.
        """
        return TrafficClass(self.kv_dscp, self.compute_cap)
