"""Configuration of a metadata server."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kvstore.core.errors import InvalidArgument
from kvstore.process.effective_config import EffectiveSetting
from kvstore.process.tls import TlsConfig
from kvstore.rpc.address import check_address, check_metrics_address, is_unix, stays_on_host

_MAX_WORKERS = 64
MIN_EVENTS_BYTES = 1 << 20
"""About a longest batch of a long chain; who watches begins anew where a single change does not fit."""


@dataclass(frozen=True, slots=True)
class MetadataConfig:
    """One metadata server on one host.

    Args:
        index_path: directory of the index; made where it is missing. It may be deleted while the server is down: nodes
            publish again what they hold.
        listen: ``"host:port"`` (port 0: any) or ``"unix:/path"``.
        map_bytes: the most that the index may grow to on disk (address space only, until it is used).
        heartbeat_interval_ms: how often nodes are asked to call.
        node_ttl_ms: silence after which a node is hidden from lookups.
        node_forget_ms: silence after which a node is forgotten, with all that it published.
        path_policy: over which nodes' storage links loads are read, where a client does not say; ``kvstore.dualpath.policies``.
        alpha_tokens: a node whose reading queue is longer is passed over where another prefill engine has room: tokens that its
            storage link reads in about 3 s.
        beta_tokens: a prefill engine with more tokens than this gets no more requests: what it computes in about 5 s.
        engine_ttl_ms: silence after which an engine group is dead, and what it had is given to others.
        request_ttl_ms: requests are forgotten so long after they came, if engines never said that they are done.
        max_requests: requests that wait or are under way; one more is refused.
        workers: server processes that share the port and the index.
        tokens_file: who may call what (``kvstore.rpc.auth.tokens``); None: whoever reaches it.
        stop_grace_ms: how long calls under way may take when it ends.
        events_bytes: the most memory that past block events may take; it bounds how far a subscriber may fall behind.
        max_subscribers: to block events, at once; one more is refused.
        tls: this server's identity; None: plain text.
        metrics_listen: address of ``/metrics``, plain HTTP; worker N of several serves N ports further; None: not served.
        ready_file: written atomically as JSON ``{"address", "pid", "metrics_address"}`` once calls are answered.
        allow_insecure_remote: listen without TLS where other hosts can reach it.
        in_force: the configuration that all this was made of, for those who ask; shown, not used.

    Raises:
        InvalidArgument: a value that cannot work, or an open door that nobody asked for.
    """

    index_path: Path
    listen: str = "127.0.0.1:7400"
    map_bytes: int = 16 << 30
    heartbeat_interval_ms: int = 500
    node_ttl_ms: int = 2_500
    node_forget_ms: int = 86_400_000
    path_policy: str = "split"
    alpha_tokens: int = 75_000
    beta_tokens: int = 100_000
    engine_ttl_ms: int = 5_000
    request_ttl_ms: int = 21_600_000
    max_requests: int = 100_000
    workers: int = 1
    stop_grace_ms: int = 5_000
    events_bytes: int = 32 << 20
    max_subscribers: int = 64
    tokens_file: Path | None = None
    tls: TlsConfig | None = None
    metrics_listen: str | None = None
    ready_file: Path | None = None
    allow_insecure_remote: bool = False
    in_force: tuple[EffectiveSetting, ...] = ()

    @property
    def orders_path(self) -> Path:
        """File of what operators ordered and what must outlive the index: beside its folder, which may be deleted."""
        return self.index_path.with_name(f"{self.index_path.name}.orders.json")

    def __post_init__(self) -> None:
        check_address(self.listen)
        if self.map_bytes < 1 << 20:
            raise InvalidArgument("map_bytes takes at least 1 MiB", map_bytes=self.map_bytes)
        if not 10 <= self.heartbeat_interval_ms < self.node_ttl_ms:
            raise InvalidArgument(
                "a node must be asked to call more often than its silence is tolerated, at most every 10 ms",
                heartbeat_interval_ms=self.heartbeat_interval_ms,
                node_ttl_ms=self.node_ttl_ms,
            )
        if self.node_forget_ms < self.node_ttl_ms:
            raise InvalidArgument(
                "a node is hidden before it is forgotten", node_forget_ms=self.node_forget_ms, node_ttl_ms=self.node_ttl_ms
            )
        if min(self.alpha_tokens, self.beta_tokens, self.max_requests) < 1 or not 10 <= self.engine_ttl_ms < self.request_ttl_ms:
            raise InvalidArgument(
                "scheduling takes limits above 0, and groups that are given up sooner than requests",
                alpha_tokens=self.alpha_tokens,
                beta_tokens=self.beta_tokens,
                max_requests=self.max_requests,
                engine_ttl_ms=self.engine_ttl_ms,
                request_ttl_ms=self.request_ttl_ms,
            )
        if self.events_bytes < MIN_EVENTS_BYTES or self.max_subscribers < 1:
            raise InvalidArgument(
                "past events take some room, and somebody to tell them to",
                events_bytes=self.events_bytes,
                least=MIN_EVENTS_BYTES,
                max_subscribers=self.max_subscribers,
            )
        if not 1 <= self.workers <= _MAX_WORKERS:
            raise InvalidArgument("workers is out of range", workers=self.workers, least=1, most=_MAX_WORKERS)
        if self.workers > 1 and is_unix(self.listen):
            raise InvalidArgument("several workers share a TCP port; a unix socket belongs to one", listen=self.listen)
        if self.tls is None and not self.allow_insecure_remote and not stays_on_host(self.listen):
            raise InvalidArgument(
                "refusing to listen beyond this host without TLS; give certificates, or set allow_insecure_remote",
                listen=self.listen,
            )
        check_metrics_address(self.metrics_listen, allow_remote=self.allow_insecure_remote)
