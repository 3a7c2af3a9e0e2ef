"""Findings on the Valkey Cluster that ``metadata.engine`` names. Pure functions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from kvstore.core.index_backend import IndexBackend, IndexServer
from kvstore.doctor.contract import Finding, Level
from kvstore.health.quantities import show_size

AREA: Final = "index"
NODE_TIMEOUT_MS: Final = 2_000
"""A longer ``cluster-node-timeout`` makes lookups miss the records of a lost shard for long."""
MEMORY_SHARE: Final = 0.9
_SOME: Final = 3


class SeedProblem(StrEnum):
    """Why a server of ``metadata.engine`` cannot be used."""

    SILENT = "silent"
    REFUSED_LOGIN = "refused_login"
    REFUSED_COMMAND = "refused_command"
    WANTS_TLS = "wants_tls"
    NO_TLS = "no_tls"
    BAD_CERTIFICATE = "bad_certificate"
    NO_CLUSTER = "no_cluster"
    NOT_READY = "not_ready"
    TOO_OLD = "too_old"


_WORDS: Final = {
    SeedProblem.SILENT: ("does not answer", None),
    SeedProblem.REFUSED_LOGIN: (
        "rejects the user or the password",
        "--set metadata.valkey_password_file=/etc/kvstore/valkey   # and metadata.valkey_user, unless it is the default user",
    ),
    SeedProblem.REFUSED_COMMAND: (
        "does not permit its commands to the user",
        "valkey-cli ACL LOG   # names the command",
    ),
    SeedProblem.WANTS_TLS: ("closes the connection: it may require TLS", "--set metadata.engine=valkeys://HOST:PORT"),
    SeedProblem.NO_TLS: ("does not speak TLS", "--set metadata.engine=valkey://HOST:PORT"),
    SeedProblem.BAD_CERTIFICATE: (
        "shows a certificate that is not trusted",
        "--set metadata.valkey_ca=/etc/kvstore/ca.pem   # the CA that signed it; the name in it must be that of the address",
    ),
    SeedProblem.NO_CLUSTER: (
        "is not part of a cluster",
        "valkey-server --cluster-enabled yes   # then: valkey-cli --cluster create HOST:PORT ...",
    ),
    SeedProblem.NOT_READY: ("is not ready", None),
    SeedProblem.TOO_OLD: ("is too old", "sudo apt install valkey-server   # Debian 13; restart each server with it"),
}


@dataclass(frozen=True, slots=True)
class SeedAnswer:
    """Result of a call to one server that ``metadata.engine`` names."""

    address: str
    problem: SeedProblem | None = None
    """None: it can be used."""
    detail: str = ""


@dataclass(frozen=True, slots=True)
class RunningIndex:
    """The cluster as this host reaches it.

    Attributes:
        seeds: the servers that the configuration names; empty: the index is a file.
        backend: all servers of the cluster; empty: no seed can be used.
        error: why the cluster cannot be asked at all; None: it can.
    """

    seeds: Sequence[SeedAnswer] = ()
    backend: IndexBackend = field(default_factory=IndexBackend)
    error: str | None = None


def index_findings(index: RunningIndex) -> Iterator[Finding]:
    """Report the cluster; nothing if the index is a file."""
    if index.error is not None:
        yield Finding(AREA, Level.MISSING, index.error)
        return
    usable = [seed for seed in index.seeds if seed.problem is None]
    for seed in index.seeds:
        yield _of_seed(seed, others=bool(usable))
    if index.backend.is_shared:
        yield from _of_cluster(index.backend)


def _of_seed(seed: SeedAnswer, *, others: bool) -> Finding:
    named = f"{seed.address} (metadata.engine)"
    if seed.problem is None:
        return Finding(AREA, Level.OK, f"{named} answers")
    words, fix = _WORDS[seed.problem]
    detail = f": {seed.detail}" if seed.detail else ""
    rest = "; the other servers of the setting are used" if others else ""
    return Finding(AREA, Level.WARNING if others else Level.MISSING, f"{named} {words}{detail}{rest}", fix)


def _of_cluster(backend: IndexBackend) -> Iterator[Finding]:
    primaries = [server for server in backend.servers if server.primary]
    answering = [server for server in backend.servers if server.away_s is None]
    replicated = any(server.replicas for server in primaries)
    versions = sorted({server.version for server in answering if server.version})
    shape = f"shards: {len(primaries)}, replicas that answer: {sum(server.replicas for server in primaries)}"
    differ = len(versions) > 1
    message = f"{shape}, {', '.join(versions) or 'version unknown'}{': versions differ' if differ else ''}"
    yield Finding(AREA, Level.WARNING if differ else Level.OK, message)
    if backend.unserved_slots:
        message = f"{backend.unserved_slots:,} hash slots have no server: blocks whose records belong there are not found"
        yield Finding(AREA, Level.MISSING, message, f"valkey-cli --cluster fix {backend.servers[0].address}")
    away = [server for server in backend.servers if server.away_s is not None]
    yield from _about(away, "no answer", Level.WARNING, "kvstore status --detail")
    yield from _about(
        [server for server in primaries if server.away_s is None and not server.replicas],
        "primary without a replica; if it ends, nodes send its records again",
        Level.WARNING,
        "valkey-cli --cluster add-node NEW:PORT EXISTING:PORT --cluster-slave",
    )
    yield from _of_abilities(answering)
    yield from _about(
        [server for server in answering if replicated and (server.node_timeout_ms or 0) > NODE_TIMEOUT_MS],
        f"cluster-node-timeout above {NODE_TIMEOUT_MS} ms: a lost primary is replaced late",
        Level.WARNING,
        f"valkey-cli CONFIG SET cluster-node-timeout {NODE_TIMEOUT_MS}   # on each server, and in its file",
    )
    yield from _about(
        [server for server in answering if server.eviction_policy not in {"", "noeviction"}],
        "a maxmemory-policy that deletes records; noeviction is required",
        Level.WARNING,
        "valkey-cli CONFIG SET maxmemory-policy noeviction   # on each server, and in its file",
    )
    yield from _about(
        [server for server in answering if server.snapshots or server.append_only],
        "data is written to disk: each fork stops the server for a moment and can double its memory",
        Level.WARNING,
        "valkey-cli CONFIG SET save '' appendonly no   # on each server, and in its file",
    )
    yield from _of_memory(answering)


def _of_abilities(answering: Sequence[IndexServer]) -> Iterator[Finding]:
    old = [server for server in answering if server.compare_and_set is False]
    if old:
        yield from _about(old, "no compare-and-set: a script is used, at a higher cost of CPU", Level.INFO, None)
    elif answering:
        yield Finding(AREA, Level.OK, "all servers have compare-and-set")
    unknown = [server for server in answering if server.snapshots is None or server.node_timeout_ms is None]
    yield from _about(unknown, "the user may not run CONFIG GET: persistence and node timeout are not known", Level.INFO, None)


def _of_memory(answering: Sequence[IndexServer]) -> Iterator[Finding]:
    full = [
        server
        for server in answering
        if server.limit_bytes and server.used_bytes is not None and server.used_bytes > MEMORY_SHARE * server.limit_bytes
    ]
    for server in full[:_SOME]:
        message = f"{server.address} uses {show_size(server.used_bytes or 0)} of {show_size(server.limit_bytes or 0)} (maxmemory)"
        yield Finding(AREA, Level.WARNING, message, "valkey-cli CONFIG SET maxmemory SIZE   # or add a shard")
    if answering and not any(server.limit_bytes for server in answering):
        message = "no server has a maxmemory: the kernel kills a server that outgrows its host"
        yield Finding(AREA, Level.INFO, message, "valkey-cli CONFIG SET maxmemory SIZE   # on each server, and in its file")


def _about(servers: Sequence[IndexServer], words: str, level: Level, fix: str | None) -> Iterator[Finding]:
    """Yield one finding about all of these servers, if there are any."""
    if servers:
        named = ", ".join(server.address for server in servers[:_SOME])
        more = f" and {len(servers) - _SOME} more" if len(servers) > _SOME else ""
        yield Finding(AREA, level, f"{named}{more}: {words}", fix)
