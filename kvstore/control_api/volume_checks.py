"""Online checks of durable volumes: their JSON schemas, and the calls to the nodes that run them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final, Literal

from pydantic import Field

from kvproto.v1 import admin_pb2 as pb
from kvstore.control_api.schemas.base import RequestModel, ResponseModel
from kvstore.control_api.schemas.store import Bytes, Count, Seconds
from kvstore.control_api.store_rpc import NodeRpc, StoreRpc, operation_id
from kvstore.core.errors import NotFound

LEAST_BYTES_PER_S: Final = 1_000_000
CheckStateName = Literal["none", "waiting", "running", "done", "cancelled", "failed"]
STATES: Final[dict[int, CheckStateName]] = {
    pb.CHECK_STATE_NONE: "none",
    pb.CHECK_STATE_WAITING: "waiting",
    pb.CHECK_STATE_RUNNING: "running",
    pb.CHECK_STATE_DONE: "done",
    pb.CHECK_STATE_CANCELLED: "cancelled",
    pb.CHECK_STATE_FAILED: "failed",
}


class BeginCheck(RequestModel):
    """Parameters of a volume check."""

    bytes_per_s: int | None = Field(
        default=None,
        ge=LEAST_BYTES_PER_S,
        le=2**53,
        description="read rate limit in bytes per second; null: a tenth of the volume's measured read rate; below 2 GB/s,"
        " 200 MB/s, but at most half of the rate",
        examples=[200_000_000],
    )


class VolumeCheck(ResponseModel):
    """State of a volume check. It is kept in the node's memory and lost if the node restarts."""

    volume_id: str = Field(description="volume that is checked", examples=["host-1/nvme0"])
    state: CheckStateName = Field(
        description="none: no check since the node started; waiting: for checks of other volumes; cancelled: corrupt blocks that"
        " it found stay removed; failed: see `why`",
        examples=["running"],
    )
    blocks: Count = Field(description="blocks on the volume when the check began")
    checked_blocks: Count = Field(description="processed blocks: good, bad, unreadable or gone", examples=[800])
    good_blocks: Count = Field(description="blocks with valid checksums", examples=[799])
    bad_blocks: Count = Field(description="corrupt blocks, which were removed and are misses now", examples=[1])
    rewritten_blocks: Count = Field(description="corrupt blocks that are written again from DRAM", examples=[0])
    unreadable_blocks: Count = Field(description="blocks that could not be read; they stay on the volume", examples=[0])
    gone_blocks: Count = Field(description="blocks evicted before they were checked", examples=[0])
    checked_bytes: Bytes = Field(description="bytes read")
    bytes_per_s: Bytes = Field(description="read rate limit; 0: no check", examples=[200000000])
    began_ago_s: Seconds = Field(description="time since the check was requested; 0: no check", examples=[4.2])
    took_s: Seconds = Field(description="time from the request to the end of the check, or until now", examples=[4.2])
    why: str | None = Field(description="why the check failed; null: it did not fail", examples=[None])

    @property
    def ended(self) -> bool:
        """Whether the check is over."""
        return self.state not in ("waiting", "running")


class RunningChecks:
    """Starts, follows and cancels online volume checks.

    Args:
        rpc: calls to the store.
    """

    def __init__(self, rpc: StoreRpc) -> None:
        self._rpc = rpc

    async def begin(self, node_id: str, name: str, bytes_per_s: int | None = None) -> VolumeCheck:
        """Begin a check.

        Args:
            node_id: the node.
            name: name of the volume on the node.
            bytes_per_s: read rate limit; None: default of the node.

        Raises:
            NotFound: the node or the volume does not exist.
            Conflict: a check is in progress.
            InvalidArgument: the volume is not durable.
            KVStoreError: the node failed or does not answer.
        """
        this = operation_id()  # the same for the retry

        async def ask(node: NodeRpc, volume_id: str) -> pb.VolumeCheck:
            request = pb.CheckVolumeRequest(operation_id=this, volume_id=volume_id, bytes_per_s=bytes_per_s or 0)
            return await node(node.stub.CheckVolume, request)

        return await self._ask(node_id, name, ask, changes=True)

    async def status(self, node_id: str, name: str) -> VolumeCheck:
        """Progress or result of the last check. Raises like ``begin``, except ``Conflict``."""

        async def ask(node: NodeRpc, volume_id: str) -> pb.VolumeCheck:
            return await node(node.stub.DescribeCheck, pb.DescribeCheckRequest(volume_id=volume_id))

        return await self._ask(node_id, name, ask)

    async def cancel(self, node_id: str, name: str) -> VolumeCheck:
        """Cancel a check after its current read. Raises like ``status``."""

        async def ask(node: NodeRpc, volume_id: str) -> pb.VolumeCheck:
            return await node(node.stub.CancelCheck, pb.CancelCheckRequest(volume_id=volume_id))

        return await self._ask(node_id, name, ask, changes=True)

    async def _ask(
        self, node_id: str, name: str, question: Callable[[NodeRpc, str], Awaitable[pb.VolumeCheck]], *, changes: bool = False
    ) -> VolumeCheck:
        volume_id = f"{node_id}/{name}"
        status = await self._rpc.node(node_id)
        if all(volume.volume_id != volume_id for volume in status.node.volumes):
            raise NotFound("the node has no such volume", volume_id=volume_id[:64])
        return _shown(await self._rpc.ask_node(status, lambda node: question(node, volume_id), changes=changes))


def _shown(check: pb.VolumeCheck) -> VolumeCheck:
    return VolumeCheck(
        volume_id=check.volume_id,
        state=STATES[check.state],
        blocks=check.blocks,
        checked_blocks=check.checked_blocks,
        good_blocks=check.good_blocks,
        bad_blocks=check.bad_blocks,
        rewritten_blocks=check.rewritten_blocks,
        unreadable_blocks=check.unreadable_blocks,
        gone_blocks=check.gone_blocks,
        checked_bytes=check.checked_bytes,
        bytes_per_s=check.bytes_per_s,
        began_ago_s=check.began_ago_ms / 1000,
        took_s=check.took_ms / 1000,
        why=check.why or None,
    )
