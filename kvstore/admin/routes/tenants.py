"""Routes of tenants and quotas."""

from __future__ import annotations

from typing import Annotated, Final

from fastapi import APIRouter, Query, Request, Response

from kvstore.admin.audit import audited
from kvstore.admin.etags import IfMatch, check_match, tag_of
from kvstore.admin.pagination import USUAL, Cursor, Limit, Page, after, page_of
from kvstore.admin.routes.read import TAGGED, Responses
from kvstore.admin.routes.write import STATE, meanwhile
from kvstore.control_api.commands import Commands
from kvstore.control_api.queries import Queries
from kvstore.control_api.schemas import retention as models
from kvstore.control_api.store_rpc import StoreRpc
from kvstore.core.errors import Conflict
from kvstore.core.limits import MAX_NAME_BYTES
from kvstore.observe.counters import Counters

TenantName = Annotated[
    str, Query(max_length=MAX_NAME_BYTES, description="tenant name; empty: default tenant", examples=["team-a"])
]
_OLD: Final[Responses] = {
    409: {"description": "the metadata server cannot read its settings file"},
    501: {"description": "the metadata server knows no quotas: it is of an older version"},
}
_FULL: Final[Responses] = {429: {"description": "too many tenants have a quota, or the metadata server's disk is full"}}


class Tenants:
    """Handlers of ``/v1/tenants``."""

    def __init__(self, rpc: StoreRpc, counters: Counters) -> None:
        self._queries = Queries(rpc)
        self._commands = Commands(rpc)
        self._counters = counters

    def routes(self) -> APIRouter:
        """The routes of these handlers."""
        router = APIRouter(prefix="/v1/tenants", tags=["tenants"])
        router.add_api_route("", self.tenants, methods=["GET"], summary="Tenants with usage and quota", responses=_OLD)
        router.add_api_route("/quota", self.quota, methods=["GET"], summary="Quota of a tenant", responses={**TAGGED, **_OLD})
        router.add_api_route(
            "/quota",
            self.set_quota,
            methods=["PUT"],
            summary="Set the quota of a tenant",
            responses={**TAGGED, **STATE, **_OLD, **_FULL},
        )
        router.add_api_route(
            "/quota",
            self.unset_quota,
            methods=["DELETE"],
            summary="Remove the quota of a tenant",
            responses={**TAGGED, **STATE, **_OLD},
        )
        return router

    async def tenants(self, limit: Limit = USUAL, cursor: Cursor = None) -> Page[models.Tenant]:
        """Tenants that hold blocks or have a quota, by name. Usage is from the last heartbeats of live nodes.

        Blocks of a namespace whose tenant no node knows (found at a node's start, and not known to the metadata server) count
        toward no tenant.
        """
        after("tenants", cursor)
        shown, following = page_of("tenants", await self._queries.tenants(), lambda one: one.tenant, cursor, limit)
        return Page[models.Tenant](items=shown, next_cursor=following)

    async def quota(self, response: Response, tenant: TenantName) -> models.Quota:
        """The quota of any tenant; null values mean no quota."""
        found = await self._queries.quota(tenant)
        response.headers["etag"] = tag_of(state_of(found))
        return found

    async def set_quota(
        self, request: Request, response: Response, tenant: TenantName, wanted: models.SetQuota, if_match: IfMatch = None
    ) -> models.Quota:
        """Replace the quota over all nodes. It survives restarts. Nodes receive it with their next heartbeat.

        If a tenant exceeds its quota, its coldest blocks that are not in use are evicted at once. Its later stores evict its own
        blocks to free space, and blocks without space are skipped. Stores do not raise an error for this.
        """
        return await self._set(request, response, tenant, wanted, if_match, "tenant.quota.set")

    async def unset_quota(
        self, request: Request, response: Response, tenant: TenantName, if_match: IfMatch = None
    ) -> models.Quota:
        """Remove the quota."""
        return await self._set(request, response, tenant, models.SetQuota(), if_match, "tenant.quota.unset")

    async def _set(
        self, request: Request, response: Response, tenant: str, wanted: models.SetQuota, if_match: str | None, action: str
    ) -> models.Quota:
        with audited(
            request, self._counters, action, tenant, dram_bytes=wanted.dram_bytes, nvme_bytes=wanted.nvme_bytes
        ) as result:
            found = await self._queries.quota(tenant)
            expected = found if check_match(if_match, state_of(found)) is not None else None
            try:
                done, before = await self._commands.set_quota(tenant, wanted.dram_bytes, wanted.nvme_bytes, expected)
            except Conflict as changed:
                raise meanwhile(changed, "quota") from changed
            result.update(before=state_of(before))
        response.headers["etag"] = tag_of(state_of(done))
        return done


def state_of(quota: models.Quota) -> str:
    """ETag value of a quota, in the metadata server's format."""
    dram, nvme = ("any" if most is None else most for most in (quota.dram_bytes, quota.nvme_bytes))
    return f"dram={dram},nvme={nvme}"
