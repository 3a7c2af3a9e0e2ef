"""Route of hints about sessions."""

from __future__ import annotations

from fastapi import APIRouter, Request

from kvstore.admin.audit import audited
from kvstore.admin.routes.read import MISSING, NamespaceId
from kvstore.control_api.commands import Commands
from kvstore.control_api.schemas import hints as models
from kvstore.control_api.store_rpc import StoreRpc
from kvstore.observe.counters import Counters


class Hints:
    """Handler of ``/v1/namespaces/{namespace_id}/hints``."""

    def __init__(self, rpc: StoreRpc, counters: Counters) -> None:
        self._commands = Commands(rpc)
        self._counters = counters

    def routes(self) -> APIRouter:
        """The route of this handler."""
        router = APIRouter(prefix="/v1", tags=["namespaces"])
        router.add_api_route(
            "/namespaces/{namespace_id}/hints",
            self.hint,
            methods=["POST"],
            summary="Give a hint about a session: keep its blocks, or evict them first",
            responses={
                **MISSING,
                429: {"description": "too many sessions have hints"},
                501: {"description": "no node knows the session, and a node does not support hints: it is of an older version"},
            },
        )
        return router

    async def hint(self, request: Request, namespace_id: NamespaceId, wanted: models.HintSession) -> models.SessionHinted:
        """Prolong or end the protection of a session's blocks on every node that protects some.

        Nodes know a session by its name after its engine gave a hint about it. A session that no node knows is 404: it had no
        hint, or its protection ended. The hint applies to the blocks that the session protects. It changes no result.
        """
        sent = wanted.model_dump()
        with audited(request, self._counters, "session.hint", namespace_id, **sent) as result:
            done = await self._commands.hint_session(bytes.fromhex(namespace_id), wanted)
            result.update(
                nodes=[node.node_id for node in done.nodes],
                protected_blocks=sum(node.protected_blocks for node in done.nodes),
                dropped_blocks=sum(node.dropped_blocks for node in done.nodes),
            )
        return done
