"""Options of a client. Every wait and every queue has its bound here. No time is longer than a day."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from kvclient.call.arguments import check_seconds
from kvclient.load.paths import Paths, checked_paths
from kvstore.core.errors import InvalidArgument
from kvstore.rpc.address import check_metrics_address
from kvstore.rpc.auth.tokens import TokenSource
from kvstore.transport.nixl.agent import NEEDS_TRUST, NixlOptions
from kvstore.transport.shaping.socket_marking import CS1
from kvstore.transport.shaping.traffic import TrafficClass

Verify = Literal["auto", "always", "never"]
"""When the client verifies checksums of loaded blocks.

``auto``: bytes that came over a wire to this process. Bytes in the local node's arena were verified by the node if they came from
a wire or a disk, and are verified here only if others than the node may write to its arena (``node.nixl``). ``always``: also
after the copy out of the arena. ``never``: not even over a wire (benchmarks).
"""

MAX_HINT_NODES = 16

VERIFY_CHOICES: tuple[Verify, ...] = ("auto", "always", "never")


@dataclass(frozen=True, slots=True)
class ClientOptions:
    """Bounds and choices of one client.

        options = ClientOptions(client_name="engine-0", default_deadline_s=5.0, require_store=False)

    Attributes:
        client_name: name of this client in logs and statistics of nodes.
        default_deadline_s: bound of a load or store that is called without a deadline.
        lookup_deadline_s: bound of a lookup that is called without a deadline; inside a load it uses part of the load's time.
        connect_deadline_s: bound of ``connect``, all steps together (except for finding the node, which may add
            ``lookup_deadline_s``), and of opening a session again.
        strict: raise failures of the store instead of answering misses and skips. For tests; an engine needs False.
        require_store: ``connect`` raises if the metadata server or the local node does not answer; False: it continues without
            them, and everything is a miss until they answer. With ``node="auto"`` it waits at most one second for each node of
            this host to accept a connection, and at most half of ``connect_deadline_s`` for all.
        verify: default of ``load``: ``auto``, ``always`` or ``never``, see ``Verify``.
        paths: hosts whose storage links a load may use that names none itself, for blocks in storage; None: only this host's.
        local_roles: with ``node="auto"``: preferred roles if several nodes run on this host, best first.
        local_node: with ``node="auto"``: id of the node to use if several run on this host; None: the first by role, then by id,
            that accepts a connection.
        store_node: without a local node: id of the node to store to; None: the first living one by ``store_roles``.
        store_roles: preferred roles of that node, best first.
        space_wait_s: maximum wait of a store for space in the local node, per chunk; then the chunk is skipped.
        store_chunk_bytes: a store asks for slots for about this many bytes at a time.
        load_chunk_bytes: a load requests about this many bytes per call of the local node, and copies them within one lease.
        release_bytes: released leases are sent at once if they hold this many bytes, otherwise after milliseconds.
        copy_chunk_bytes: bytes copied, at most about, between two checks of deadline and cancellation.
        pieces_in_flight: pieces of ``copy_chunk_bytes`` of a store that a device copies at once, while earlier ones are summed
            and announced; a load then has up to two calls of ``load_chunk_bytes`` under way. 1: one after the other. Host memory
            is always copied one after the other.
        lease_margin_s: a lease counts as ended this long before its nominal end.
        layer_group: without a local node: layers that arrive together in a layer-wise load.
        workers: threads for loads and stores in the background (``start_load``, ``start_store``, asyncio).
        max_pending: background calls that may wait or run at once; one more is answered as a miss or skip.
        read_streams: nodes that are read from at once, by all loads of the client.
        part_workers: parts of planned loads under way at once, of all loads of the client; more wait.
        prompt_workers: prompts awaited at once (``await_prompt``); more wait.
        tcp_streams: connections to each node.
        kv_dscp: DSCP mark of KV traffic, 0 to 63; 8 is CS1, a low class; 0: unmarked.
        compute_cap: maximum bytes per second that this process's client moves to and from other hosts, per direction; 0: no cap.
        nixl: read from nodes that have NIXL by one-sided transfers, through bounce memory, unless TLS or a cap is set; None: TCP.
        nixl_trusted_network: required for ``nixl``: anyone who reaches this process's ports may read and write its memory.
        breaker_failures: consecutive unanswered calls after which calls to the metadata server fail at once.
        breaker_pause_s: time until one call is let through as a trial.
        reopen_pause_s: minimum time between two attempts to open a lost session again.
        log_interval_s: minimum time between two log lines of one kind of failure.
        hint_nodes: other nodes that receive a hint about a session, of those that the last lookup of its chain named; 0: none.
        slow_load_s: a load that takes longer is logged with its phases.
        metrics_listen: address, ``host:port``, of ``/metrics`` and ``/loads`` of this client over plain HTTP, on this host; None:
            not served. An engine with metrics of its own adds ``kvclient.metrics.collector`` to them instead.
        token: presented to the metadata server and the nodes with every call; never printed or logged. Empty: none.
        token_file: a file that holds the token instead; it may change.
    """

    client_name: str = "kvclient"
    default_deadline_s: float = 10.0
    lookup_deadline_s: float = 1.0
    connect_deadline_s: float = 10.0
    strict: bool = False
    require_store: bool = True
    verify: Verify = "auto"
    paths: Paths | None = None
    local_roles: tuple[str, ...] = ("prefill", "decode", "storage")
    local_node: str | None = None
    store_node: str | None = None
    store_roles: tuple[str, ...] = ("storage", "prefill", "decode")
    space_wait_s: float = 2.0
    store_chunk_bytes: int = 256 << 20
    load_chunk_bytes: int = 1 << 30
    release_bytes: int = 64 << 20
    copy_chunk_bytes: int = 64 << 20
    pieces_in_flight: int = 4
    lease_margin_s: float = 0.05
    layer_group: int = 1
    workers: int = 4
    max_pending: int = 64
    read_streams: int = 8
    part_workers: int = 64
    prompt_workers: int = 64
    tcp_streams: int = 4
    kv_dscp: int = CS1
    compute_cap: int = 0
    nixl: NixlOptions | None = None
    nixl_trusted_network: bool = False
    breaker_failures: int = 3
    breaker_pause_s: float = 1.0
    reopen_pause_s: float = 0.25
    log_interval_s: float = 10.0
    hint_nodes: int = 4
    slow_load_s: float = 1.0
    metrics_listen: str | None = None
    token: str = field(default="", repr=False)
    token_file: Path | None = None

    def __post_init__(self) -> None:
        positive = (
            "store_chunk_bytes",
            "release_bytes",
            "copy_chunk_bytes",
            "pieces_in_flight",
            "layer_group",
            "workers",
            "max_pending",
            "read_streams",
            "tcp_streams",
            "part_workers",
            "prompt_workers",
            "load_chunk_bytes",
            "breaker_failures",
        )
        for name in positive:
            if not isinstance(getattr(self, name), int) or getattr(self, name) <= 0:
                raise InvalidArgument("option must be an integer above 0", option=name, value=getattr(self, name))
        if (
            isinstance(self.hint_nodes, bool)
            or not isinstance(self.hint_nodes, int)
            or not 0 <= self.hint_nodes <= MAX_HINT_NODES
        ):
            raise InvalidArgument(f"hint_nodes must be an integer from 0 to {MAX_HINT_NODES}", value=self.hint_nodes)
        for name in ("default_deadline_s", "lookup_deadline_s", "connect_deadline_s", "breaker_pause_s", "reopen_pause_s"):
            object.__setattr__(self, name, check_seconds(name, getattr(self, name)))
        for name in ("space_wait_s", "lease_margin_s", "log_interval_s", "slow_load_s"):
            object.__setattr__(self, name, check_seconds(name, getattr(self, name), zero=True))
        check_metrics_address(self.metrics_listen, allow_remote=False)
        checked_paths(self.paths)
        self.shown_token()
        self.traffic_class()
        if self.nixl is not None and not self.nixl_trusted_network:
            raise InvalidArgument(NEEDS_TRUST, option="nixl", needs="nixl_trusted_network=True")
        if self.verify not in VERIFY_CHOICES:
            raise InvalidArgument("unknown choice", option="verify", value=self.verify, choices=VERIFY_CHOICES)

    def shown_token(self) -> TokenSource | None:
        """Return the token source for a channel, or None.

        Raises:
            InvalidArgument: the token is given twice, unreadable or malformed.
        """
        return TokenSource.of(self.token, self.token_file)

    def traffic_class(self) -> TrafficClass:
        """Return the class of this client's KV traffic.

        Raises:
            InvalidArgument: ``kv_dscp`` or ``compute_cap`` is out of bounds.
        """
        return TrafficClass(self.kv_dscp, self.compute_cap)
