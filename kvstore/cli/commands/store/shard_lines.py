"""Lines about the servers that hold a shared index. Pure."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from kvstore.cli.support import output

if TYPE_CHECKING:
    from kvstore.control_api.schemas.shards import IndexServerEntry, ServingMetadataServer, Shards


def shard_summary(found: Shards) -> str:
    """One line about a shared index: shards, replicas, memory, keys, metadata servers."""
    primaries = [one for one in found.servers if one.primary]
    away = sum(one.away_s is not None for one in primaries)
    limits = [one.limit_bytes or 0 for one in primaries]
    used = sum(one.used_bytes or 0 for one in primaries)
    return "  ".join(
        [
            f"shards {len(primaries)}" + (f" ({away} away)" if away else ""),
            f"replicas {sum(one.replicas for one in primaries)}",
            f"memory {output.size(used)}" + (f"/{output.size(sum(limits))}" if all(limits) else ""),
            f"keys {sum(one.keys or 0 for one in primaries):,}",
            *([f"slots without server {found.unserved_slots:,}"] if found.unserved_slots else []),
            *([f"lost key ranges {found.lost_ranges:,}"] if found.lost_ranges else []),
            *([f"suspect key ranges {found.suspect_ranges:,}"] if found.suspect_ranges else []),
            f"metadata servers {len(found.metadata_servers)}",
        ]
    )


def shard_lines(found: Shards) -> Iterator[str]:
    """Yield a line per server of the cluster and per metadata server; none if the index is a file of one host."""
    if not found.servers:
        return
    yield f"index in Valkey: {shard_summary(found)}"
    rows = output.aligned([_cells(one) for one in found.servers])
    yield from (f"  {row}" for row in rows)
    yield "metadata servers of this index"
    yield from (f"  {row}" for row in output.aligned([_server_cells(one) for one in found.metadata_servers]))


def _cells(one: IndexServerEntry) -> list[str]:
    shard = "no shard" if one.shard is None else f"shard {one.shard}"
    lag = "" if one.lag_bytes is None else f"{output.size(one.lag_bytes)} behind"
    used = "" if one.used_bytes is None else output.size(one.used_bytes)
    if one.limit_bytes:
        used += f" of {output.size(one.limit_bytes)}"
    persists = [name for name, writes in (("snapshots", one.snapshots), ("append-only file", one.append_only)) if writes]
    return [
        shard,
        "primary" if one.primary else "replica",
        one.address,
        "answers" if one.away_s is None else f"away for {output.duration(one.away_s)}",
        one.version or "version unknown",
        f"{one.slots:,} slots, replicas {one.replicas}" if one.primary else lag or "lag unknown",
        used or output.NOTHING,
        one.eviction_policy or output.NOTHING,
        " and ".join(persists) or ("no persistence" if one.snapshots is False else output.NOTHING),
    ]


def _server_cells(one: ServingMetadataServer) -> list[str]:
    up_s = max(0.0, time.time() - one.started_s)
    roles = f"roles {', '.join(one.roles)}" if one.roles else "no roles"
    return [one.address, one.version, f"up {output.duration(up_s)}", roles, "answered this command" if one.answers_here else ""]
