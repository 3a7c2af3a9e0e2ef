"""Routes of changes. Each is idempotent, requires the role operator and is written to the audit log."""

from __future__ import annotations

from typing import Final

from fastapi import APIRouter, Request, Response

from kvproto.v1 import admin_pb2 as pb
from kvproto.v1.metadata_pb2 import NodeStatus
from kvstore.admin.audit import audited
from kvstore.admin.etags import IfMatch, check_match, tag_of
from kvstore.admin.problems import changed_meanwhile
from kvstore.admin.routes.read import MISSING, NODE, TAGGED, NamespaceId, NodeId, Responses, Routes, VolumeName
from kvstore.control_api import serializers
from kvstore.control_api.commands import Commands
from kvstore.control_api.schemas import store as models
from kvstore.control_api.store_rpc import NodeRpc, StoreRpc
from kvstore.control_api.volume_checks import BeginCheck, RunningChecks, VolumeCheck
from kvstore.core.errors import Conflict
from kvstore.observe.counters import Counters

STATE: Final[Responses] = {
    412: {"description": "If-Match names another state than there is"},
    428: {"description": "If-Match is missing"},
}
CHECKED_ALREADY: Final[Responses] = {**NODE, 409: {"description": "the volume is being checked already"}}
KEPT: Final[Responses] = {**MISSING, 409: {"description": "it is kept"}}
SAME_WEIGHTS: Final[Responses] = {**MISSING, 409: {"description": "it has this weights epoch already"}}
NO_CAP: Final[Responses] = {409: {"description": "the node was started without node.compute_cap, which a cap requires"}}
NO_METADATA_SERVER: Final[Responses] = {**NODE, 409: {"description": "the node has no metadata server"}}


class Changes:
    """Handlers of changes."""

    def __init__(self, rpc: StoreRpc, counters: Counters) -> None:
        self._rpc = rpc
        self._commands = Commands(rpc)
        self._checks = RunningChecks(rpc)
        self._counters = counters

    def routes(self) -> APIRouter:
        """The routes of these handlers: method, path, handler, tag, summary and responses other than 200."""
        router = Routes(prefix="/v1")
        add = router.add
        add("POST", "/volumes/{node_id}/{name}/evict", self.evict_volume, "volumes", "Evict the coldest blocks of a volume", NODE)
        check = "Verify the checksums of all blocks on a volume while it serves"
        add("POST", "/volumes/{node_id}/{name}/check", self.check_volume, "volumes", check, CHECKED_ALREADY, status_code=202)
        add("DELETE", "/volumes/{node_id}/{name}/check", self.cancel_check, "volumes", "Cancel a volume check", NODE)
        evict = "Evict the blocks of a namespace"
        add("POST", "/namespaces/{namespace_id}/evict", self.evict_namespace, "namespaces", evict, KEPT)
        invalidate = "Invalidate a namespace: drop all of its blocks"
        add("POST", "/namespaces/{namespace_id}/invalidate", self.invalidate_namespace, "namespaces", invalidate, MISSING)
        bump = "Register the namespace of new weights"
        add("POST", "/namespaces/{namespace_id}/weights-epoch", self.bump_weights, "namespaces", bump, SAME_WEIGHTS)
        add("GET", "/path-policy", self.path_policy, "planning", "Path policy", TAGGED)
        add("PUT", "/path-policy", self.set_path_policy, "planning", "Change the path policy", {**TAGGED, **STATE})
        drain = "Drain a node: it rejects stores, serves loads and makes its blocks durable"
        add("POST", "/nodes/{node_id}/drain", self.drain, "nodes", drain, MISSING)
        add("POST", "/nodes/{node_id}/undrain", self.undrain, "nodes", "Cancel the drain of a node", MISSING)
        capped = {**TAGGED, **NODE, **NO_CAP}
        add("GET", "/nodes/{node_id}/traffic-cap", self.traffic_cap, "nodes", "KV traffic limit of a node", capped)
        cap = "Change the KV traffic limit of a node until it restarts"
        add("PUT", "/nodes/{node_id}/traffic-cap", self.set_traffic_cap, "nodes", cap, {**TAGGED, **NODE, **STATE, **NO_CAP})
        compare = "Compare a node's volumes with the index and repair differences"
        add("POST", "/nodes/{node_id}/anti-entropy", self.anti_entropy, "nodes", compare, NO_METADATA_SERVER)
        add("POST", "/index/rebuild", self.rebuild_index, "cluster", "Rebuild the index from the nodes", STATE, status_code=202)
        return router

    # ---- eviction ----
    async def evict_volume(
        self, request: Request, node_id: NodeId, name: VolumeName, wanted: models.EvictVolume
    ) -> models.VolumeEviction:
        """Evict cold blocks. Blocks in use and dirty DRAM blocks stay."""
        volume_id = f"{node_id}/{name}"
        with audited(request, self._counters, "volume.evict", volume_id, to_percent=wanted.to_percent) as result:
            done = await self._commands.evict_volume(node_id, name, wanted.to_percent)
            result.update(evicted_blocks=done.evicted_blocks, kept_blocks=done.kept_blocks)
        return done

    async def evict_namespace(
        self, request: Request, namespace_id: NamespaceId, wanted: models.EvictNamespace
    ) -> models.NamespaceEvicted:
        """Evict blocks from some tiers on every node. A kept namespace is not evicted.

        Blocks that are in use, or in DRAM and not durable yet, are kept. Engines may store evicted blocks again at once. Blocks
        in engines' own pools of device memory are not evicted.
        """
        with audited(request, self._counters, "namespace.evict", namespace_id, tiers=wanted.tiers) as result:
            answer = await self._commands.evict_namespace(bytes.fromhex(namespace_id), wanted.tiers)
            result.update(_summary(answer))
        return answer

    async def invalidate_namespace(self, request: Request, namespace_id: NamespaceId) -> models.NamespaceEvicted:
        """Drop all blocks from all tiers on every node, also dirty blocks and kept namespaces. For blocks with wrong content.

        Stop the engines that wrote the blocks first, or they store them again. Nodes that do not answer keep their blocks and
        continue to serve them: if the response is not complete, repeat the request after these nodes are back. Engines' own pools
        of device memory are dropped only when their engines stop.
        """
        with audited(request, self._counters, "namespace.invalidate", namespace_id) as result:
            answer = await self._commands.invalidate_namespace(bytes.fromhex(namespace_id))
            result.update(_summary(answer))
        return answer

    async def bump_weights(self, request: Request, namespace_id: NamespaceId, wanted: models.BumpWeights) -> models.WeightsBump:
        """Register the namespace with the same spec and new weights, and drop the blocks of the old weights.

        A namespace is identified by its spec. Engines use the new namespace after they are restarted with the new weights epoch;
        until then they continue to use the old one.
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
        """Start a check in the background at a limited rate. `GET` the same path for its progress.

        Corrupt blocks are removed as by a load: they become misses, and their slots are quarantined until the node restarts. The
        state of a check is lost if the node restarts. `kvstore volumes check --offline` checks volumes that no node has open.
        """
        with audited(
            request, self._counters, "volume.check", f"{node_id}/{name}", bytes_per_s=wanted.bytes_per_s
        ) as result:  # fmt: skip
            done = await self._checks.begin(node_id, name, wanted.bytes_per_s)
            result.update(state=done.state)
        return done

    async def cancel_check(self, request: Request, node_id: NodeId, name: VolumeName) -> VolumeCheck:
        """Cancel the check after its current read. Corrupt blocks that it has found stay removed."""
        with audited(request, self._counters, "volume.check.cancel", f"{node_id}/{name}") as result:
            done = await self._checks.cancel(node_id, name)
            result.update(state=done.state, checked_blocks=done.checked_blocks, bad_blocks=done.bad_blocks)
        return done

    # ---- draining ----
    async def drain(self, request: Request, node_id: NodeId, wanted: models.SetDrain) -> models.Participation:
        """Drain a node until the drain is cancelled, also over restarts. `GET` the node for its progress.

        A drained node may be stopped. Its blocks stay on its volumes and are found again after it restarts; with `move`, other
        nodes also serve them until then.
        """
        with audited(request, self._counters, "node.drain", node_id, move=wanted.move) as result:
            status = await self._rpc.drain_node(node_id, move=wanted.move)
            answer = serializers.participation(status)
            result.update(state=answer.state)
        return answer

    async def undrain(self, request: Request, node_id: NodeId) -> models.Participation:
        """Cancel the drain. Blocks that were moved to other nodes stay there."""
        with audited(request, self._counters, "node.undrain", node_id) as result:
            answer = serializers.participation(await self._rpc.undrain_node(node_id))
            result.update(state=answer.state)
        return answer

    # ---- settings at run time ----
    async def path_policy(self, response: Response) -> models.PathPolicy:
        """The policy of loads whose request names none."""
        found = await self._rpc.planning()
        response.headers["etag"] = tag_of(found.path_policy)
        return models.PathPolicy(policy=found.path_policy, configured=found.configured_policy)

    async def set_path_policy(
        self, request: Request, response: Response, wanted: models.SetPathPolicy, if_match: IfMatch = None
    ) -> models.PathPolicy:
        """Change the policy of new plans. The change holds over restarts until metadata.path_policy is set here again."""
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
        """Limit of KV traffic on the compute network in bytes per second, in each direction."""
        cap = await self._cap(await self._rpc.node(node_id))
        response.headers["etag"] = tag_of(str(cap))
        return models.TrafficCap(node_id=node_id, bytes_per_s=cap)

    async def set_traffic_cap(
        self, request: Request, response: Response, node_id: NodeId, wanted: models.SetTrafficCap, if_match: IfMatch = None
    ) -> models.TrafficCap:
        """Change the limit, also for existing connections. Set node.compute_cap to keep it over restarts."""
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
    async def anti_entropy(self, request: Request, node_id: NodeId) -> models.DigestComparison:
        """Repair ranges that differ. Ranges that change during the repair are left to the next round."""
        with audited(request, self._counters, "node.anti_entropy", node_id) as result:

            async def ask(node: NodeRpc) -> pb.CompareIndexResponse:
                return await node(node.stub.CompareIndex, pb.CompareIndexRequest())

            done = await self._rpc.change_node(await self._rpc.node(node_id), ask)
            result.update(repaired_ranges=done.repaired_ranges)
        return models.DigestComparison(node_id=node_id, repaired_ranges=done.repaired_ranges)

    async def rebuild_index(self, request: Request, if_match: IfMatch = None) -> models.IndexRebuild:
        """Rebuild the index with the epoch in If-Match (ETag of `GET /v1/index`); a repeated call drops nothing.

        The metadata server is unavailable for a moment. Until all nodes have sent their inventories, lookups find fewer blocks
        than the nodes hold. No block is lost.
        """
        with audited(request, self._counters, "index.rebuild", "metadata") as result:
            epoch = (await self._rpc.server()).index_epoch
            check_match(if_match, epoch.hex())
            result.update(dropped_epoch=epoch.hex())
            try:
                done = await self._rpc.rebuild_index(epoch)
            except Conflict as changed:
                raise meanwhile(changed, "epoch") from changed
        return models.IndexRebuild(dropped_epoch=done.dropped_epoch.hex())


def meanwhile(changed: Conflict, field: str) -> Exception:
    """Turn a conflict with the expected state into 412; return other conflicts unchanged."""
    return changed_meanwhile(tag_of(changed.fields.get(field, ""))) if "expected" in changed.fields else changed


def _summary(answer: models.NamespaceEvicted) -> dict[str, object]:
    """Details for the audit log."""
    return {
        "complete": answer.complete,
        "evicted_blocks": answer.evicted_blocks,
        "kept_blocks": answer.kept_blocks,
        "unreached": [one.node_id for one in answer.unreached][:16],
    }
