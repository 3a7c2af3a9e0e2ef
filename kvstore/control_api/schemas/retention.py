"""JSON schemas of tenant quotas and namespace retention rules."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from kvstore.control_api.schemas.base import RequestModel, ResponseModel
from kvstore.control_api.schemas.store import Bytes, Count, HexId
from kvstore.core.limits import MAX_COPIES

TenantName = Annotated[
    str, Field(description="tenant name from the namespace spec; empty: the default tenant", examples=["team-a"])
]
_MOST_BYTES = 2**53
_DRAM = "quota in DRAM over all nodes; 0: only blocks in use; null: no quota"
_NVME = "quota on NVMe volumes over all nodes; 0: nothing; null: no quota"


class Quota(ResponseModel):
    """Quota of a tenant in payload bytes. The ETag covers both values."""

    tenant: TenantName
    dram_bytes: Bytes | None = Field(description=_DRAM, examples=[68719476736])
    nvme_bytes: Bytes | None = Field(description=_NVME, examples=[1099511627776])


class SetQuota(RequestModel):
    """New quota of a tenant. A missing value removes that quota."""

    dram_bytes: int | None = Field(default=None, ge=0, le=_MOST_BYTES, description=_DRAM, examples=[68719476736])
    nvme_bytes: int | None = Field(default=None, ge=0, le=_MOST_BYTES, description=_NVME, examples=[1099511627776])


class TenantTier(ResponseModel):
    """Usage of a tenant in one tier over all live nodes. A block on several nodes counts once per node."""

    held_bytes: Bytes = Field(description="payload bytes, from the last heartbeats", examples=[34359738368])
    quota_bytes: Bytes | None = Field(description="null: no quota", examples=[68719476736])


class Tenant(ResponseModel):
    """A tenant that holds blocks or has a quota."""

    tenant: TenantName
    dram: TenantTier = Field(description="usage and quota in DRAM")
    nvme: TenantTier = Field(description="usage and quota on NVMe volumes")
    nodes: Count = Field(description="nodes that hold blocks of the tenant", examples=[3])


_TTL = "time to live in seconds: blocks that were not used for this time are evicted; null: no time to live"
_KEPT = "its blocks are not evicted, up to half of each tier of a node; above that, its coldest blocks are evicted first"
_COPIES = "number of nodes whose volumes hold each durable block; 2 survives the loss of a node with its volumes"
_MOST_TTL_S = 10 * 366 * 86_400


class Rule(ResponseModel):
    """Retention rule of a namespace. The ETag covers all values."""

    namespace_id: HexId = Field(description="namespace that the rule applies to")
    ttl_s: float | None = Field(description=_TTL, examples=[604800.0])
    kept: bool = Field(description=_KEPT, examples=[False])
    copies: int = Field(ge=1, le=MAX_COPIES, description=_COPIES, examples=[1])


class SetRule(RequestModel):
    """New retention rule of a namespace. It replaces the whole old one: a field that is left out gets its default."""

    ttl_s: float | None = Field(default=None, ge=0.001, le=_MOST_TTL_S, description=_TTL, examples=[604800.0])
    kept: bool = Field(default=False, description=_KEPT, examples=[False])
    copies: int = Field(default=1, ge=1, le=MAX_COPIES, description=_COPIES, examples=[1])
