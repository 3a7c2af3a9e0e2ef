"""What the admin REST answers and takes of what may stay: tenants' quotas, rules of namespaces; ``models`` has all else."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from kvstore.control_api.schemas.store import Bytes, Count, HexId, Shown, Taken

TenantName = Annotated[str, Field(description="as in the spec of its namespaces; empty: the default tenant", examples=["team-a"])]
_MOST_BYTES = 2**53
_DRAM = "in DRAM, all nodes together; 0: only what is in use; null: as much as there is"
_NVME = "on volumes, all nodes together; 0: nothing; null: as much as there is"


class Quota(Shown):
    """What a tenant may hold, in bytes of payload. The ETag is both."""

    tenant: TenantName
    dram_bytes: Bytes | None = Field(description=_DRAM, examples=[68719476736])
    nvme_bytes: Bytes | None = Field(description=_NVME, examples=[1099511627776])


class SetQuota(Taken):
    """The quota to be, as a whole: what is not said has no bound."""

    dram_bytes: int | None = Field(default=None, ge=0, le=_MOST_BYTES, description=_DRAM, examples=[68719476736])
    nvme_bytes: int | None = Field(default=None, ge=0, le=_MOST_BYTES, description=_NVME, examples=[1099511627776])


class TenantTier(Shown):
    """One tenant in one tier, all living nodes together. A block on several nodes counts on each."""

    held_bytes: Bytes = Field(description="of payload, as nodes said last", examples=[34359738368])
    quota_bytes: Bytes | None = Field(description="null: none", examples=[68719476736])


class Tenant(Shown):
    """A tenant that holds something, or has a quota."""

    tenant: TenantName
    dram: TenantTier
    nvme: TenantTier
    nodes: Count = Field(description="that hold something of it", examples=[3])


_TTL = "blocks that were neither stored nor loaded for so long leave, with all below them; null: never for that"
_PINNED = "its blocks are not evicted, up to half of each tier of a node; beyond that its coldest make room first"
_MOST_TTL_S = 10 * 366 * 86_400


class Rule(Shown):
    """What may stay of a namespace. The ETag is both."""

    namespace_id: HexId
    ttl_s: float | None = Field(description=_TTL, examples=[604800.0])
    pinned: bool = Field(description=_PINNED, examples=[False])


class SetRule(Taken):
    """The rule to be, as a whole."""

    ttl_s: float | None = Field(default=None, ge=0.001, le=_MOST_TTL_S, description=_TTL, examples=[604800.0])
    pinned: bool = Field(default=False, description=_PINNED, examples=[False])
