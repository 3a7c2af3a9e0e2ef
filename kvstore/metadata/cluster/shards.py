"""The servers of a shared index, and the metadata servers that serve it, as a message."""

from __future__ import annotations

from dataclasses import asdict

from kvproto.v1 import admin_pb2 as pb
from kvstore.core.index_backend import IndexServer
from kvstore.index.contract import PrefixIndex
from kvstore.metadata.membership.server_table import ServerTable


def describe_shards(index: PrefixIndex, table: ServerTable) -> pb.DescribeShardsResponse:
    """Describe what is known now; nothing is asked."""
    backend = index.backend()
    holders = index.lease_holders() if index.leases_roles else {}
    return pb.DescribeShardsResponse(
        servers=map(_server, backend.servers),
        unserved_slots=backend.unserved_slots,
        lost_ranges=backend.lost_ranges,
        suspect_ranges=backend.suspect_ranges,
        metadata_servers=[
            pb.MetadataServerInfo(
                server_id=one.server_id,
                address=one.address,
                version=one.version,
                started_seconds=one.started_s,
                answers_here=one.server_id == table.server_id,
                roles=sorted(role for role, holder in holders.items() if holder.server == one.server_id),
            )
            for one in table.servers()
        ],
    )


def _server(one: IndexServer) -> pb.IndexServer:
    fields = asdict(one)
    away_s = fields.pop("away_s")
    return pb.IndexServer(**fields, away_ms=None if away_s is None else int(away_s * 1000))
