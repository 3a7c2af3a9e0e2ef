"""Metrics of the data plane."""

from __future__ import annotations

from typing import Final

from kvstore.observe.metrics import MetricGroup

group = MetricGroup("Data plane")
ACCEPT_ERRORS: Final = group.counter("transport_accept_errors_total", "failed attempts to accept a data connection")
BAD_FRAMES: Final = group.counter("transport_bad_frames_total", "data connections closed because of malformed frames")
BYTES_RECEIVED: Final = group.counter("transport_bytes_received_total", "payload bytes received by the data-plane server")
BYTES_SENT: Final = group.counter("transport_bytes_sent_total", "payload bytes sent by the data-plane server")
CAP_WAIT_SECONDS: Final = group.counter(
    "transport_cap_wait_seconds_total",
    "time that transfers waited for the bandwidth cap",
    event="transport_cap_wait_us_total",
    scale=1e-06,
)
CONNECTIONS: Final = group.counter("transport_connections_total", "connections that the data plane accepted")
CONNECTIONS_REFUSED: Final = group.counter(
    "transport_connections_refused_total", "data connections refused because too many were open"
)
CORRUPT_BLOCKS: Final = group.counter("transport_corrupt_blocks_total", "blocks received in writes with a wrong checksum")
IDLE_CONNECTIONS_CLOSED: Final = group.counter(
    "transport_idle_connections_closed_total", "data connections closed by the idle timeout"
)
UNAUTHENTICATED_CONNECTIONS_DROPPED: Final = group.counter(
    "transport_unauthenticated_connections_dropped_total", "unauthenticated data connections closed in favour of new ones"
)
IDLE_CONNECTIONS_DROPPED: Final = group.counter(
    "transport_idle_connections_dropped_total", "idle data connections closed in favour of new ones"
)
INTERNAL_ERRORS: Final = group.counter("transport_internal_errors_total", "data connections closed because of an internal error")
NIXL_AGENTS: Final = group.counter("transport_nixl_agents_total", "NIXL agents that the process created")
NIXL_ATTACHED: Final = group.counter("transport_nixl_attached_total", "connections that agreed on one-sided transfers")
NIXL_BOUNCE_TIMEOUTS: Final = group.counter(
    "transport_nixl_bounce_timeouts_total", "transfers that timed out waiting for bounce memory"
)
NIXL_BOUNCED_BYTES: Final = group.counter(
    "transport_nixl_bounced_bytes_total", "payload bytes of unregistered memory, copied through bounce memory"
)
NIXL_BYTES_RECEIVED: Final = group.counter("transport_nixl_bytes_received_total", "payload bytes received by NIXL")
NIXL_BYTES_SENT: Final = group.counter("transport_nixl_bytes_sent_total", "payload bytes served by NIXL")
NIXL_FAILURES: Final = group.counter("transport_nixl_failures_total", "served reads whose one-sided transfer failed")
NIXL_FALLBACKS: Final = group.counter(
    "transport_nixl_fallbacks_total", "times that a peer was switched to TCP because NIXL failed"
)
NIXL_FENCES_BROKEN: Final = group.counter("transport_nixl_fences_broken_total", "fences after which the NIXL agent did not end")
NIXL_FENCES: Final = group.counter("transport_nixl_fences_total", "NIXL agents ended to stop late bytes of abandoned transfers")
NIXL_PULLS_DENIED: Final = group.counter(
    "transport_nixl_pulls_denied_total", "readers that requested pull mode over TCP and got push mode"
)
NIXL_REFUSED: Final = group.counter(
    "transport_nixl_refused_total", "connections that requested one-sided transfers and were refused"
)
NIXL_UNAVAILABLE: Final = group.counter(
    "transport_nixl_unavailable_total", "processes configured for NIXL in which it does not work"
)
NIXL_UNFIT_READS: Final = group.counter(
    "transport_nixl_unfit_reads_total", "parts of reads sent over TCP because they exceed the bounce memory"
)
PEER_BREAKER_OPENED: Final = group.counter(
    "transport_peer_breaker_opened_total", "times that repeated failures opened the circuit breaker of a peer"
)
PEER_BROKEN: Final = group.counter("transport_peer_broken_total", "requests to peers whose connection broke")
PEER_BYTES_RECEIVED: Final = group.counter("transport_peer_bytes_received_total", "payload bytes received from peers")
PEER_BYTES_SENT: Final = group.counter("transport_peer_bytes_sent_total", "payload bytes sent to peers")
PEER_CONNECT_FAILURES: Final = group.counter("transport_peer_connect_failures_total", "failed connects to peers")
PEER_CONNECTS: Final = group.counter("transport_peer_connects_total", "connections made to peers")
PEER_CORRUPT_BLOCKS: Final = group.counter(
    "transport_peer_corrupt_blocks_total", "blocks received from peers with a wrong checksum"
)
PEER_FAST_FAILURES: Final = group.counter("transport_peer_fast_failures_total", "requests refused by an open circuit breaker")
PEER_HELPERS_REFUSED: Final = group.counter(
    "transport_peer_helpers_refused_total", "reads with fewer streams because a thread could not be started"
)
PEER_HUNG: Final = group.counter("transport_peer_hung_total", "times that a server stopped answering while calls waited for it")
PEER_IDLE_BROKEN: Final = group.counter("transport_peer_idle_broken_total", "idle connections to peers that were found broken")
PEER_POOL_TIMEOUTS: Final = group.counter(
    "transport_peer_pool_timeouts_total", "requests that timed out waiting for a free connection"
)
PEER_TIMEOUTS: Final = group.counter("transport_peer_timeouts_total", "requests that peers did not answer in time")
PEER_UNAUTHENTICATED: Final = group.counter("transport_peer_unauthenticated_total", "tickets refused by peers")
PEER_WAITS_CUT: Final = group.counter("transport_peer_waits_cut_total", "calls cancelled because their server stopped answering")
PEER_WAITS_REFUSED: Final = group.counter(
    "transport_peer_waits_refused_total", "calls refused because their server does not answer"
)
PEER_WAITS_UNCHECKED: Final = group.counter(
    "transport_peer_waits_unchecked_total", "calls whose server was not probed because a thread could not be started"
)
PEER_WRITES_LOST: Final = group.counter("transport_peer_writes_lost_total", "blocks written to peers without a confirmation")
PERMISSION_DENIED: Final = group.counter(
    "transport_permission_denied_total", "requests for a namespace that the ticket does not allow"
)
READS: Final = group.counter("transport_reads_total", "reads that the data plane served")
REQUESTS_CUT: Final = group.counter("transport_requests_cut_total", "requests whose peer disconnected before the end")
SERVER_STUCK_THREADS: Final = group.counter("transport_server_stuck_threads_total", "server threads that did not end at stop")
STALLED_PEERS: Final = group.counter(
    "transport_stalled_peers_total", "connections closed because the peer stalled during a request"
)
TLS_FAILURES: Final = group.counter("transport_tls_failures_total", "TLS handshakes that failed")
UNAUTHENTICATED: Final = group.counter("transport_unauthenticated_total", "data connections without a valid ticket")
UNMARKED_SOCKETS: Final = group.counter("transport_unmarked_sockets_total", "sockets that could not be marked as KV traffic")
WRITES_ABORTED: Final = group.counter("transport_writes_aborted_total", "writes that ended before all their bytes arrived")
WRITES: Final = group.counter("transport_writes_total", "writes that the data plane accepted")
