"""Changes. Each is a line of the audit log, takes the role operator, and says what it brought; doing one twice does no harm."""

from __future__ import annotations

from typing import Final

from fastapi import APIRouter, Request, Response

from kvproto.v1 import admin_pb2 as pb
from kvproto.v1.metadata_pb2 import NodeStatus
from kvstore.admin.audit import audited
from kvstore.admin.etags import IfMatch, check_match, tag_of
from kvstore.admin.problems import changed_meanwhile
from kvstore.admin.routes.read import MISSING, NODE, TAGGED, NamespaceId, NodeId, Responses, VolumeName
from kvstore.control_api import serializers
from kvstore.control_api.commands import Commands
from kvstore.control_api.schemas import store as models
from kvstore.control_api.store_rpc import NodeRpc, StoreRpc
from kvstore.control_api.volume_checks import BeginCheck, VolumeCheck, VolumeChecks
from kvstore.core.errors import Conflict
from kvstore.observe.counters import Counters

STATE: Final[Responses] = {
    412: {"description": "If-Match names another state than there is"},
    428: {"description": "If-Match is missing"},
}


class Changes:
    """Handlers of changes."""

    def __init__(self, rpc: StoreRpc, counters: Counters) -> None:
        self._rpc = rpc
        self._commands = Commands(rpc)
        self._checks = VolumeChecks(rpc)
        self._counters = counters

    def routes(self) -> APIRouter:
        """Where they answer."""
        router = APIRouter(prefix="/v1")
        add = router.add_api_route
        add(
            "/volumes/{node_id}/{name}/evict",
            self.evict_volume,
            methods=["POST"],
            tags=["volumes"],
            summary="Evict a volume's coldest blocks down to a fill",
            responses=NODE,
        )
        add(
            "/volumes/{node_id}/{name}/check",
            self.check_volume,
            methods=["POST"],
            tags=["volumes"],
            summary="Read every block of a durable volume and compare it with its checksums, while it serves",
            responses={**NODE, 409: {"description": "the volume is being checked already"}},
            status_code=202,
        )
        add(
            "/volumes/{node_id}/{name}/check",
            self.cancel_check,
            methods=["DELETE"],
            tags=["volumes"],
            summary="Cancel the check of a volume",
            responses=NODE,
        )
        add(
            "/namespaces/{namespace_id}/evict",
            self.evict_namespace,
            methods=["POST"],
            tags=["namespaces"],
            summary="Evict a namespace's blocks",
            responses={**MISSING, 409: {"description": "it is pinned"}},
        )
        add(
            "/namespaces/{namespace_id}/invalidate",
            self.invalidate_namespace,
            methods=["POST"],
            tags=["namespaces"],
            summary="Drop every block of a namespace, durable or not",
            responses=MISSING,
        )
        add(
            "/namespaces/{namespace_id}/weights-epoch",
            self.bump_weights,
            methods=["POST"],
            tags=["namespaces"],
            summary="Go on to the next weights: another namespace",
            responses={**MISSING, 409: {"description": "it has this weights epoch already"}},
        )
        add(
            "/path-policy",
            self.path_policy,
            methods=["GET"],
            tags=["planning"],
            summary="The path policy in force",
            responses=TAGGED,
        )
        add(
            "/path-policy",
            self.set_path_policy,
            methods=["PUT"],
            tags=["planning"],
            summary="Change the path policy, until the metadata server is started again",
            responses={**TAGGED, **STATE, 409: {"description": "several metadata workers plan, each for itself"}},
        )
        add(
            "/nodes/{node_id}/drain",
            self.drain,
            methods=["POST"],
            tags=["nodes"],
            summary="Drain a node: it takes nothing new, serves what it holds, and makes everything durable",
            responses=MISSING,
        )
        add(
            "/nodes/{node_id}/undrain",
            self.undrain,
            methods=["POST"],
            tags=["nodes"],
            summary="Let a node take part again",
            responses=MISSING,
        )
        add(
            "/nodes/{node_id}/traffic-cap",
            self.traffic_cap,
            methods=["GET"],
            tags=["nodes"],
            summary="A node's cap on KV traffic",
            responses={**TAGGED, **NODE, 409: {"description": "the node was started without a cap, and cannot be given one"}},
        )
        add(
            "/nodes/{node_id}/traffic-cap",
            self.set_traffic_cap,
            methods=["PUT"],
            tags=["nodes"],
            summary="Change a node's cap on KV traffic, until it is started again",
            responses={
                **TAGGED,
                **NODE,
                **STATE,
                409: {"description": "the node was started without a cap, and cannot be given one"},
            },
        )
        add(
            "/nodes/{node_id}/anti-entropy",
            self.anti_entropy,
            methods=["POST"],
            tags=["nodes"],
            summary="Compare a node's volumes with the index now, and mend what differs",
            responses={**NODE, 409: {"description": "the node has no metadata server"}},
        )
        add(
            "/index/rebuild",
            self.rebuild_index,
            methods=["POST"],
            tags=["cluster"],
            summary="Drop the index and make it anew from the nodes",
            responses=STATE,
            status_code=202,
        )
        return router

    # ---- eviction ----
    async def evict_volume(
        self, request: Request, node_id: NodeId, name: VolumeName, wanted: models.EvictVolume
    ) -> models.Evicted:
        """What is in use stays, and in DRAM what is not durable yet."""
        volume_id = f"{node_id}/{name}"
        with audited(request, self._counters, "volume.evict", volume_id, to_percent=wanted.to_percent) as result:
            done = await self._commands.evict_volume(node_id, name, wanted.to_percent)
            result.update(evicted_blocks=done.evicted_blocks, kept_blocks=done.kept_blocks)
        return done

    async def evict_namespace(
        self, request: Request, namespace_id: NamespaceId, wanted: models.EvictNamespace
    ) -> models.NamespaceEvicted:
        """Makes room: its blocks leave the tiers named, at every node. Refused while it is pinned.

        What is in use, or in DRAM and not durable yet, stays; engines may store what left again at once. Blocks in engines' own
        pools of device memory are not touched.
        """
        with audited(request, self._counters, "namespace.evict", namespace_id, tiers=wanted.tiers) as result:
            answer = await self._commands.evict_namespace(bytes.fromhex(namespace_id), wanted.tiers)
            result.update(_summary(answer))
        return answer

    async def invalidate_namespace(self, request: Request, namespace_id: NamespaceId) -> models.NamespaceEvicted:
        """For blocks that are wrong: all that is there when a node is asked goes, from all tiers, durable or not, pinned or not.

        Stop the engines that made them first, or they store them again. Nodes that do not answer keep what they have: where the
        answer is not complete, do it again once they are back; until then what they hold is served. Engines' own pools of device
        memory end with their engines.
        """
        with audited(request, self._counters, "namespace.invalidate", namespace_id) as result:
            answer = await self._commands.invalidate_namespace(bytes.fromhex(namespace_id))
            result.update(_summary(answer))
        return answer

    async def bump_weights(self, request: Request, namespace_id: NamespaceId, wanted: models.BumpWeights) -> models.Bumped:
        """Registers the namespace of the same spec with other weights, and drops what was stored with the old ones.

        A namespace is its spec: engines change over when they are started with the new weights epoch, and until then go on in the
        old one.
        """
        with audited(
            request, self._counters, "namespace.weights_epoch", namespace_id,
            weights_epoch=wanted.weights_epoch, invalidate=wanted.invalidate,
        ) as result:  # fmt: skip
            made = await self._commands.bump_weights(
                bytes.fromhex(namespace_id), wanted.weights_epoch, invalidate=wanted.invalidate
            )
            result.update(namespace_id=made.namespace_id)
            if made.invalidated is not None:
                result.update(_summary(made.invalidated))
        return made

    # ---- checking ----
    async def check_volume(self, request: Request, node_id: NodeId, name: VolumeName, wanted: BeginCheck) -> VolumeCheck:
        """In the background, beside all else, and no faster than asked: `GET` the same path to see how far it is.

        What is bad is taken out as a load would take it out: a miss from then on, and its slot rests until the node is started
        again. Nothing of a check outlives the node's process. For volumes that no node has open there is
        `kvstore volume check`, which also mends.
        """
        with audited(
            request, self._counters, "volume.check", f"{node_id}/{name}", bytes_per_s=wanted.bytes_per_s
        ) as result:  # fmt: skip
            done = await self._checks.begin(node_id, name, wanted.bytes_per_s)
            result.update(state=done.state)
        return done

    async def cancel_check(self, request: Request, node_id: NodeId, name: VolumeName) -> VolumeCheck:
        """It ends after the read that is under way; what it found until then stays out. Where there is none, nothing is done."""
        with audited(request, self._counters, "volume.check.cancel", f"{node_id}/{name}") as result:
            done = await self._checks.cancel(node_id, name)
            result.update(state=done.state, checked_blocks=done.checked_blocks, bad_blocks=done.bad_blocks)
        return done

    # ---- taking part ----
    async def drain(self, request: Request, node_id: NodeId, wanted: models.SetDrain) -> models.Participation:
        """Holds over restarts, until it is lifted. Look at the node again to see how far it is.

        Once it is drained it may be stopped: what it holds stays on its volumes and is found again when it is back; with `move`
        others have it meanwhile.
        """
        with audited(request, self._counters, "node.drain", node_id, move=wanted.move) as result:
            status = await self._rpc.drain_node(node_id, move=wanted.move)
            answer = serializers.participation(status)
            result.update(state=answer.state)
        return answer

    async def undrain(self, request: Request, node_id: NodeId) -> models.Participation:
        """What was copied to others stays there."""
        with audited(request, self._counters, "node.undrain", node_id) as result:
            answer = serializers.participation(await self._rpc.undrain_node(node_id))
            result.update(state=answer.state)
        return answer

    # ---- settings at run time ----
    async def path_policy(self, response: Response) -> models.PathPolicy:
        """What decides where a request names no policy. Of several metadata workers, one answers."""
        found = await self._rpc.planning()
        response.headers["etag"] = tag_of(found.path_policy)
        return models.PathPolicy(policy=found.path_policy, configured=found.configured_policy)

    async def set_path_policy(
        self, request: Request, response: Response, wanted: models.SetPathPolicy, if_match: IfMatch = None
    ) -> models.PathPolicy:
        """For loads planned from now on; plans under way go on. Set metadata.path_policy too where it is to last."""
        with audited(request, self._counters, "path_policy.set", "metadata", policy=wanted.policy) as result:
            found = await self._rpc.planning()
            expected = check_match(if_match, found.path_policy)
            try:
                done = await self._rpc.set_path_policy(wanted.policy, expected)
            except Conflict as changed:
                raise meanwhile(changed, "policy") from changed
            result.update(before=done.before)
        response.headers["etag"] = tag_of(done.policy)
        return models.PathPolicy(policy=done.policy, configured=found.configured_policy)

    async def traffic_cap(self, response: Response, node_id: NodeId) -> models.TrafficCap:
        """The most bytes a second of KV over the compute network, each direction."""
        cap = await self._cap(await self._rpc.node(node_id))
        response.headers["etag"] = tag_of(str(cap))
        return models.TrafficCap(node_id=node_id, bytes_per_s=cap)

    async def set_traffic_cap(
        self, request: Request, response: Response, node_id: NodeId, wanted: models.SetTrafficCap, if_match: IfMatch = None
    ) -> models.TrafficCap:
        """At once, for connections that are there too. Set node.compute_cap too where it is to last."""
        with audited(request, self._counters, "traffic_cap.set", node_id, bytes_per_s=wanted.bytes_per_s) as result:
            status = await self._rpc.node(node_id)
            current = await self._cap(status)
            expected = None if check_match(if_match, str(current)) is None else current

            async def ask(node: NodeRpc) -> pb.SetTrafficCapResponse:
                asked = pb.SetTrafficCapRequest(bytes_per_s=wanted.bytes_per_s, expected=expected)
                return await node(node.stub.SetTrafficCap, asked)

            try:
                done = await self._rpc.change_node(status, ask)
            except Conflict as changed:
                raise meanwhile(changed, "cap") from changed
            result.update(before=done.before)
        response.headers["etag"] = tag_of(str(done.bytes_per_s))
        return models.TrafficCap(node_id=node_id, bytes_per_s=done.bytes_per_s)

    async def _cap(self, status: NodeStatus) -> int:
        async def ask(node: NodeRpc) -> pb.DescribeNodeResponse:
            return await node(node.stub.DescribeNode, pb.DescribeNodeRequest())

        found = await self._rpc.ask_node(status, ask)
        if not found.HasField("cap_bytes_per_s"):
            raise Conflict(
                "this node was started without a cap, so its connections cannot be held back: set node.compute_cap",
                node_id=status.node.node_id,
            )
        return found.cap_bytes_per_s

    # ---- the index ----
    async def anti_entropy(self, request: Request, node_id: NodeId) -> models.Compared:
        """Ranges that change while they are compared are left for the next time."""
        with audited(request, self._counters, "node.anti_entropy", node_id) as result:

            async def ask(node: NodeRpc) -> pb.CompareIndexResponse:
                return await node(node.stub.CompareIndex, pb.CompareIndexRequest())

            done = await self._rpc.change_node(await self._rpc.node(node_id), ask)
            result.update(repaired_ranges=done.repaired_ranges)
        return models.Compared(node_id=node_id, repaired_ranges=done.repaired_ranges)

    async def rebuild_index(self, request: Request, if_match: IfMatch = None) -> models.Rebuilding:
        """Only of the epoch that If-Match names (the ETag of `GET /v1/index`), so that a call sent twice drops one index.

        The metadata server is away for a moment; until all inventories are there, lookups find less than is held. No block is
        lost.
        """
        with audited(request, self._counters, "index.rebuild", "metadata") as result:
            epoch = (await self._rpc.server()).index_epoch
            check_match(if_match, epoch.hex())
            result.update(dropped_epoch=epoch.hex())
            try:
                done = await self._rpc.rebuild_index(epoch)
            except Conflict as changed:
                raise meanwhile(changed, "epoch") from changed
        return models.Rebuilding(dropped_epoch=done.dropped_epoch.hex())


def meanwhile(changed: Conflict, field: str) -> Exception:
    """A conflict with what was expected is a state that changed between look and change; any other one is itself."""
    return changed_meanwhile(tag_of(changed.fields.get(field, ""))) if "expected" in changed.fields else changed


def _summary(answer: models.NamespaceEvicted) -> dict[str, object]:
    """For the audit log."""
    return {
        "complete": answer.complete,
        "evicted_blocks": answer.evicted_blocks,
        "kept_blocks": answer.kept_blocks,
        "unreached": [one.node_id for one in answer.unreached][:16],
    }
