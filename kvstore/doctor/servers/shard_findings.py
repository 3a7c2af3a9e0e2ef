"""Findings on the Valkey Cluster that ``metadata.engine`` names. Pure functions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from kvstore.core.index_backend import IndexBackend, IndexServer
from kvstore.doctor.contract import Finding, Level
from kvstore.health.codes import Severity
from kvstore.health.findings import by_severity
from kvstore.health.shards import shard_findings

AREA: Final = "index"
NODE_TIMEOUT_MS: Final = 2_000
"""A longer ``cluster-node-timeout`` makes lookups miss the records of a lost shard for long."""
_SOME: Final = 3
_LEVELS: Final = {Severity.INFO: Level.INFO, Severity.WARNING: Level.WARNING, Severity.ERROR: Level.MISSING}


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
    """Report what a metadata server would report, and settings that matter before the first start."""
    answering = [server for server in backend.servers if server.away_s is None]
    replicas = sum(server.replicas for server in backend.servers)
    versions = sorted({server.version for server in answering if server.version})
    shape = f"shards: {sum(server.primary for server in backend.servers)}, replicas that answer: {replicas}"
    yield Finding(AREA, Level.OK, f"{shape}, {', '.join(versions) or 'version unknown'}")
    for one in by_severity(shard_findings(backend)):
        yield Finding(AREA, _LEVELS[one.severity], f"{one.facts} {one.code.action}")
    yield from _about(
        [server for server in answering if replicas and (server.node_timeout_ms or 0) > NODE_TIMEOUT_MS],
        f"cluster-node-timeout above {NODE_TIMEOUT_MS} ms: a lost primary is replaced late",
        Level.WARNING,
        f"valkey-cli CONFIG SET cluster-node-timeout {NODE_TIMEOUT_MS}   # on each server, and in its file",
    )
    unknown = [server for server in answering if server.snapshots is None or server.node_timeout_ms is None]
    yield from _about(unknown, "the user may not run CONFIG GET: persistence and node timeout are not known", Level.INFO, None)
    if answering and not any(server.limit_bytes for server in answering):
        message = "no server has a maxmemory: the kernel kills a server that outgrows its host"
        yield Finding(AREA, Level.INFO, message, "valkey-cli CONFIG SET maxmemory SIZE   # on each server, and in its file")


def _about(servers: Sequence[IndexServer], words: str, level: Level, fix: str | None) -> Iterator[Finding]:
    """Yield one finding about all of these servers, if there are any."""
    if servers:
        named = ", ".join(server.address for server in servers[:_SOME])
        more = f" and {len(servers) - _SOME} more" if len(servers) > _SOME else ""
        yield Finding(AREA, level, f"{named}{more}: {words}", fix)
