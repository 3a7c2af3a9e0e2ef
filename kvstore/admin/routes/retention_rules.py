"""Routes of retention rules: times to live, kept namespaces and copies."""

from __future__ import annotations

from typing import Final

from fastapi import APIRouter, Request, Response

from kvstore.admin.audit import audited
from kvstore.admin.etags import IfMatch, check_match, tag_of
from kvstore.admin.pagination import USUAL, Cursor, Limit, Page, after, page_of
from kvstore.admin.routes.read import MISSING, TAGGED, NamespaceId, Responses
from kvstore.admin.routes.write import STATE, meanwhile
from kvstore.control_api.commands import Commands
from kvstore.control_api.queries import Queries
from kvstore.control_api.schemas import retention as models
from kvstore.control_api.store_rpc import StoreRpc
from kvstore.core.errors import Conflict
from kvstore.observe.counters import Counters

_LISTING: Final[Responses] = {
    409: {"description": "the metadata server cannot read its settings file"},
    501: {"description": "the metadata server does not list rules: it is of an older version"},
}
_SETTING: Final[Responses] = {
    409: {"description": "the metadata server cannot read its settings file"},
    429: {"description": "too many namespaces have a rule, or the metadata server's disk is full"},
    501: {"description": "the metadata server knows no rules: it is of an older version"},
}


class Rules:
    """Handlers of ``/v1/rules`` and ``/v1/namespaces/{namespace_id}/rule``."""

    def __init__(self, rpc: StoreRpc, counters: Counters) -> None:
        self._queries = Queries(rpc)
        self._commands = Commands(rpc)
        self._counters = counters

    def routes(self) -> APIRouter:
        """The routes of these handlers."""
        router = APIRouter(prefix="/v1", tags=["namespaces"])
        router.add_api_route("/rules", self.rules, methods=["GET"], summary="Retention rules", responses=_LISTING)
        path = "/namespaces/{namespace_id}/rule"
        router.add_api_route(
            path, self.rule, methods=["GET"], summary="Retention rule of a namespace", responses={**TAGGED, **MISSING}
        )
        router.add_api_route(
            path,
            self.set_rule,
            methods=["PUT"],
            summary="Keep a namespace, or set its time to live or copies",
            responses={**TAGGED, **MISSING, **STATE, **_SETTING},
        )
        return router

    async def rules(self, limit: Limit = USUAL, cursor: Cursor = None) -> Page[models.Rule]:
        """All rules by namespace id, including namespaces that the index has forgotten."""
        after("rules", cursor)
        shown, following = page_of("rules", await self._queries.rules(), lambda one: one.namespace_id, cursor, limit)
        return Page[models.Rule](items=shown, next_cursor=following)

    async def rule(self, response: Response, namespace_id: NamespaceId) -> models.Rule:
        """Time to live, copies, and whether the namespace is kept."""
        found = await self._queries.rule(bytes.fromhex(namespace_id))
        response.headers["etag"] = tag_of(state_of(found))
        return found

    async def set_rule(
        self, request: Request, response: Response, namespace_id: NamespaceId, wanted: models.SetRule, if_match: IfMatch = None
    ) -> models.Rule:
        """Replace the rule at every node. It survives restarts. Nodes receive it with their next heartbeat.

        The time to live of a block counts from its last use that the node knows of, but not from before the node's start or the
        time at which the rule was set. Blocks in use are not evicted, nor are those of a kept namespace, up to half of each
        tier of a node. Evicting a kept namespace is rejected; invalidating it drops its blocks.

        With two copies, another node copies each durable block in the background. Such a block survives the loss of a node with
        its volumes.
        """
        new = models.Rule(namespace_id=namespace_id, **wanted.model_dump())
        with audited(request, self._counters, "namespace.rule", namespace_id, **wanted.model_dump()) as result:
            found = await self._queries.rule(bytes.fromhex(namespace_id))
            expected = found if check_match(if_match, state_of(found)) is not None else None
            try:
                done, before = await self._commands.set_rule(new, expected)
            except Conflict as changed:
                raise meanwhile(changed, "rule") from changed
            result.update(before=state_of(before))
        response.headers["etag"] = tag_of(state_of(done))
        return done


def state_of(rule: models.Rule) -> str:
    """ETag value of a rule, in the metadata server's format."""
    return f"ttl={round((rule.ttl_s or 0) * 1000)},kept={'yes' if rule.kept else 'no'},copies={rule.copies}"
