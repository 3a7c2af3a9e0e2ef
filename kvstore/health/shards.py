"""Derive the findings of a shared index from its servers and from the metadata servers that serve it. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final

from kvstore.core.index_backend import IndexBackend, IndexServer
from kvstore.health import codes
from kvstore.health.findings import HealthFinding
from kvstore.health.quantities import show_duration, show_size

MEMORY_SHARE: Final = 0.9
"""Share of a server's limit of memory above which it is nearly full."""
MOST_ALIKE: Final = 8
"""Findings of one code about single servers."""
_NO_EVICTION: Final = "noeviction"


def shard_findings(backend: IndexBackend, metadata_servers: int | None = None) -> Iterator[HealthFinding]:
    """Yield the findings of an index.

    Args:
        backend: the servers that hold the index; for a file of one host there are none.
        metadata_servers: number of metadata servers that serve it; None: unknown.
    """
    if not backend.is_shared:
        return
    if backend.unserved_slots:
        facts = f"{backend.unserved_slots:,} of 16,384 hash slots of the index have no server."
        yield HealthFinding(codes.SLOTS_WITHOUT_SERVER, "", facts)
    replicated = any(not server.primary for server in backend.servers)
    found = [finding for server in backend.servers for finding in _of_server(server)]
    yield from _first_of_each_code([one for one in found if replicated or one.code is not codes.SHARD_WITHOUT_REPLICA])
    if backend.servers and not replicated:
        yield HealthFinding(codes.INDEX_WITHOUT_REPLICAS, "", "The servers of the index are primaries without replicas.")
    yield from _of_versions(backend)
    if metadata_servers == 1:
        facts = "Only this metadata server serves the index, which several could share."
        yield HealthFinding(codes.ONE_METADATA_SERVER, "", facts)


def _first_of_each_code(found: Sequence[HealthFinding]) -> Iterator[HealthFinding]:
    """Yield a few findings of each code, so that a large cluster hides no other findings."""
    for code, number in Counter(finding.code for finding in found).items():
        alike = [finding for finding in found if finding.code is code][:MOST_ALIKE]
        left_out = number - len(alike)
        yield from alike[:-1]
        yield replace(alike[-1], facts=f"{alike[-1].facts} {left_out} others have this finding.") if left_out else alike[-1]


def _of_server(server: IndexServer) -> Iterator[HealthFinding]:
    if server.primary:
        yield from _of_primary(server)
    if server.away_s is not None:
        return
    if server.used_bytes is not None and server.limit_bytes and server.used_bytes > MEMORY_SHARE * server.limit_bytes:
        facts = f"{_named(server)} uses {show_size(server.used_bytes)} of {show_size(server.limit_bytes)} (maxmemory)."
        yield HealthFinding(codes.SHARD_MEMORY_NEARLY_FULL, server.address, facts)
    if server.eviction_policy not in {"", _NO_EVICTION}:
        facts = f"{_named(server)} has maxmemory-policy {server.eviction_policy}."
        yield HealthFinding(codes.SHARD_EVICTS_RECORDS, server.address, facts)
    kinds = [name for name, writes in (("snapshots", server.snapshots), ("an append-only file", server.append_only)) if writes]
    if kinds:
        facts = f"{_named(server)} writes {' and '.join(kinds)} to its disk."
        yield HealthFinding(codes.SHARD_PERSISTS, server.address, facts)


def _of_primary(server: IndexServer) -> Iterator[HealthFinding]:
    if server.away_s is not None:
        facts = f"{_named(server)} has served no command for {show_duration(server.away_s)}; {_replicas(server.replicas)}."
        yield HealthFinding(codes.SHARD_AWAY, f"shard {server.shard}", facts)
    elif not server.replicas:
        facts = f"{_named(server)} has no replica that answers."
        yield HealthFinding(codes.SHARD_WITHOUT_REPLICA, f"shard {server.shard}", facts)


def _of_versions(backend: IndexBackend) -> Iterator[HealthFinding]:
    answering = [server for server in backend.servers if server.away_s is None]
    versions = sorted({server.version for server in answering if server.version})
    if len(versions) > 1:
        yield HealthFinding(codes.SHARD_VERSIONS_DIFFER, "", f"The servers of the index run {', '.join(versions)}.")
    old = [server for server in answering if server.compare_and_set is False]
    if old:
        facts = f"{len(old)} of {len(answering)} servers of the index, for example {old[0].address}, run {old[0].version}."
        yield HealthFinding(codes.SHARD_WITHOUT_COMPARE_AND_SET, "", facts)


def _named(server: IndexServer) -> str:
    if server.shard is None:
        return f"The server {server.address}"
    return f"The {'primary' if server.primary else 'replica'} {server.address} of shard {server.shard}"


def _replicas(number: int) -> str:
    return "no replica answers" if not number else f"{number} {'replica answers' if number == 1 else 'replicas answer'}"
