"""Derive the findings of a whole store from reports of the metadata server and its nodes. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from kvproto.v1 import common_pb2, metadata_pb2
from kvstore.core.index_backend import IndexBackend
from kvstore.health import codes
from kvstore.health.codes import HealthCode
from kvstore.health.findings import MAX_FINDINGS, HealthFinding, by_severity, from_proto
from kvstore.health.node_reachability import Reachability
from kvstore.health.quantities import show_duration, show_size
from kvstore.health.shards import shard_findings

QUOTA_SHARE: Final = 0.95
"""Share of a quota above which it is nearly used."""
OVER_QUOTA: Final = 1.05
"""Share of a quota above which it is exceeded. Loads and late reports exceed it by a little."""
CLOCK_S: Final = 5.0
"""Difference between two clocks that is reported. A heartbeat may be late by a call's timeout."""
_GIB: Final = 1 << 30
_FREE_SHARE: Final = 0.05


@dataclass(frozen=True, slots=True)
class FileSystem:
    """Space on a file system, in bytes."""

    total_bytes: int
    free_bytes: int

    @property
    def nearly_full(self) -> bool:
        """Whether less than 5 % and less than 1 GiB is free."""
        return self.free_bytes < min(_GIB, self.total_bytes * _FREE_SHARE)


@dataclass(frozen=True, slots=True)
class QuotaUse:
    """Usage of one tenant in one tier, in bytes."""

    tenant: str
    tier: str
    held_bytes: int
    quota_bytes: int


@dataclass(frozen=True, slots=True)
class ServerReport:
    """State of the metadata server.

    Attributes:
        index_failing: why changes of the index fail; empty: they succeed.
        index_failing_s: seconds since they began to fail.
        index_path: folder of the index.
        index_disk: space on its file system; None: unknown.
        settings_problem: why the file of quotas and rules cannot be read; empty: it can be read.
        settings_path: that file.
        unwritten: files of the server that could not be written, with the reason.
        quotas: tenants with a quota.
        findings: findings of the process, for example about its certificate.
        backend: the servers that hold the index.
        metadata_servers: number of metadata servers that serve the index.
    """

    index_failing: str = ""
    index_failing_s: float = 0.0
    index_path: str = ""
    index_disk: FileSystem | None = None
    settings_problem: str = ""
    settings_path: str = ""
    unwritten: Mapping[str, str] = field(default_factory=dict)
    quotas: Sequence[QuotaUse] = ()
    findings: Sequence[HealthFinding] = ()
    backend: IndexBackend = field(default_factory=IndexBackend)
    metadata_servers: int = 1


@dataclass(frozen=True, slots=True)
class NodeReport:
    """A node as the metadata server sees it, and the result of a probe if it is silent."""

    status: metadata_pb2.NodeStatus
    reachability: Reachability = Reachability.NOT_PROBED


@dataclass(frozen=True, slots=True)
class ClusterReport:
    """Everything that findings are derived from."""

    server: ServerReport = field(default_factory=ServerReport)
    nodes: Sequence[NodeReport] = ()


def find(report: ClusterReport) -> list[HealthFinding]:
    """Return all findings, errors first, at most ``MAX_FINDINGS``. Caches of engines, nodes without an address, have none."""
    found = [*_of_server(report.server)]
    nodes = [node for node in report.nodes if node.status.node.control_address]
    if not nodes:
        found.append(HealthFinding(codes.NO_NODES, "", "No node has registered with this metadata server."))
    away = _away_shards(report.server.backend)
    reported: dict[tuple[str, str], list[HealthFinding]] = {}
    for node in nodes:
        found += _of_node(node)
        for one in _reported_by(node, away):
            reported.setdefault(one.identity, []).append(one)
    found += map(_merged, reported.values())
    return by_severity(found)[:MAX_FINDINGS]


# ---- metadata server ----
def _of_server(server: ServerReport) -> Iterator[HealthFinding]:
    if server.index_failing:
        facts = f"The index has accepted no changes for {show_duration(server.index_failing_s)}: {server.index_failing}"
        yield HealthFinding(codes.INDEX_READ_ONLY, "", facts)
    elif (disk := server.index_disk) is not None and disk.nearly_full:
        facts = f"{server.index_path} has {show_size(disk.free_bytes)} free of {show_size(disk.total_bytes)}."
        yield HealthFinding(codes.INDEX_DISK_NEARLY_FULL, "", facts)
    if server.settings_problem:
        facts = f"{server.settings_path} cannot be read: {server.settings_problem}"
        yield HealthFinding(codes.SETTINGS_FILE_UNREADABLE, "", facts)
    for path, why in server.unwritten.items():
        yield HealthFinding(codes.FILE_NOT_WRITTEN, path, f"{path} cannot be written: {why}")
    for use in server.quotas:
        if use.quota_bytes and use.held_bytes > QUOTA_SHARE * use.quota_bytes:
            name = use.tenant or "(default)"
            over = use.held_bytes > OVER_QUOTA * use.quota_bytes
            held, quota = show_size(use.held_bytes), show_size(use.quota_bytes)
            of = f"in {use.tier}, more than its quota of {quota}" if over else f"of {quota} in {use.tier}"
            facts = f"Tenant {name} holds {held} {of}."
            yield HealthFinding(codes.QUOTA_EXCEEDED if over else codes.QUOTA_NEARLY_USED, name, facts)
    yield from server.findings
    yield from shard_findings(server.backend, server.metadata_servers)


# ---- nodes ----
def _of_node(node: NodeReport) -> Iterator[HealthFinding]:
    status = node.status
    node_id = status.node.node_id
    if not status.alive:
        yield _not_reporting(node)
        return
    if status.state == common_pb2.NODE_STATE_DRAIN_BLOCKED:
        lost = f"{status.drain.not_durable_blocks:,} blocks would be lost if it stopped now"
        yield HealthFinding(codes.DRAIN_BLOCKED, node_id, f"Node {node_id} cannot be drained ({status.drain.why}): {lost}.")
    offset_s = status.clock_offset_ms / 1000
    if abs(offset_s) > CLOCK_S:
        way = "ahead of" if offset_s > 0 else "behind"
        facts = f"The clock of node {node_id}'s host is {show_duration(abs(offset_s))} {way} that of the metadata server."
        yield HealthFinding(codes.CLOCK_DIFFERS, node_id, facts)


def _reported_by(node: NodeReport, away: str) -> Iterator[HealthFinding]:
    status = node.status
    for one in from_proto(status.findings) if status.alive else ():
        facts = f"{one.facts}{away}" if one.code is codes.PUBLISH_FAILS else one.facts
        yield HealthFinding(one.code, one.subject or status.node.node_id, facts)


def _away_shards(backend: IndexBackend) -> str:
    """Sentence about the shards that do not answer, which may be why nodes cannot publish; empty: all answer."""
    primaries = [server for server in backend.servers if server.primary]
    away = sum(server.away_s is not None for server in primaries)
    return f" {away} of {len(primaries)} shards of the index do not answer." if away else ""


def _merged(alike: Sequence[HealthFinding]) -> HealthFinding:
    """Return one finding for those that several nodes report: the facts of the first, and the number of nodes."""
    first = alike[0]
    return first if len(alike) == 1 else replace(first, facts=f"{first.facts} {len(alike)} nodes report this.")


_Sentence = Callable[[str, str, str], str]
_SILENT: Final[Mapping[Reachability, tuple[HealthCode, _Sentence]]] = {
    Reachability.NOT_PROBED: (
        codes.NODE_SILENT,
        lambda node, _, age: f"Node {node} has not reported for {age}.",
    ),
    Reachability.REFUSED: (
        codes.NODE_DOWN,
        lambda node, address, age: f"Node {node} has not reported for {age}: nothing listens on {address}.",
    ),
    Reachability.NO_ANSWER: (
        codes.NODE_HUNG,
        lambda node, address, age: (
            f"Node {node} has not reported for {age}: {address} accepts connections, but the process does not respond."
        ),
    ),
    Reachability.UNREACHABLE: (
        codes.NODE_UNREACHABLE,
        lambda node, address, age: f"Node {node} has not reported for {age}: its host ({address}) cannot be reached.",
    ),
    Reachability.ANSWERS: (
        codes.NODE_CUT_OFF,
        lambda node, address, age: f"Node {node} answers at {address}, but its heartbeats have not arrived for {age}.",
    ),
}


def _not_reporting(node: NodeReport) -> HealthFinding:
    status = node.status
    node_id, address = status.node.node_id, status.node.control_address
    if status.refused:
        facts = f"Node {node_id} is refused by the metadata server: {status.refused} (node.token_file)."
        return HealthFinding(codes.NODE_REFUSED, node_id, facts)
    if status.stopped:
        drained = " after it was drained" if status.state == common_pb2.NODE_STATE_DRAINED else ""
        return HealthFinding(codes.NODE_STOPPED, node_id, f"Node {node_id} was stopped{drained}.")
    code, sentence = _SILENT[node.reachability]
    return HealthFinding(code, node_id, sentence(node_id, address, show_duration(status.heartbeat_age_ms / 1000)))
