"""Online checks of durable volumes: their JSON schemas, and the calls to the nodes that run them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final, Literal

from pydantic import Field

from kvproto.v1 import admin_pb2 as pb
from kvstore.control_api.schemas.store import Bytes, Count, Seconds, Shown, Taken
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


class BeginCheck(Taken):
    """How a volume is to be checked."""

    bytes_per_s: int | None = Field(
        default=None,
        ge=LEAST_BYTES_PER_S,
        le=2**53,
        description="the most that it reads, over time; null: a tenth of what the volume was measured to read, 200 MB/s where it"
        " was not measured",
        examples=[200_000_000],
    )


class VolumeCheck(Shown):
    """A check of a durable volume, under way or over. It is in its node's memory: a node that was started again knows of none."""

    volume_id: str = Field(examples=["host-1/nvme0"])
    state: CheckStateName = Field(
        description="none: none was begun since the node was started; waiting: for checks of the node's other volumes;"
        " cancelled: what it found until then stays out; failed: see `why`",
        examples=["running"],
    )
    blocks: Count = Field(description="that the volume held when it began; those that came later were just written")
    checked_blocks: Count = Field(description="looked at so far: good, bad, unreadable or gone before their turn", examples=[800])
    good_blocks: Count = Field(description="are what their checksums say", examples=[799])
    bad_blocks: Count = Field(description="are not, and were taken out: a miss, as if a load had found them", examples=[1])
    rewritten_blocks: Count = Field(description="of the bad: lie in DRAM too, and are written anew from there", examples=[0])
    unreadable_blocks: Count = Field(description="the disk gave no answer; they stay, and a load tries again", examples=[0])
    gone_blocks: Count = Field(description="left before their turn", examples=[0])
    checked_bytes: Bytes = Field(description="read so far")
    bytes_per_s: Bytes = Field(description="the most that it reads, over time; 0 where there is none", examples=[200000000])
    began_ago_s: Seconds = Field(description="since it was asked for; 0 where there is none", examples=[4.2])
    took_s: Seconds = Field(description="from then to its end, or until now", examples=[4.2])
    why: str | None = Field(description="it failed; null: it did not", examples=[None])

    @property
    def ended(self) -> bool:
        """Nothing more will come of it."""
        return self.state not in ("waiting", "running")


class VolumeChecks:
    """Starts, follows and cancels online volume checks.

    Args:
        rpc: whom to ask.
    """

    def __init__(self, rpc: StoreRpc) -> None:
        self._rpc = rpc

    async def begin(self, node_id: str, name: str, bytes_per_s: int | None = None) -> VolumeCheck:
        """Begins a check.

        Args:
            node_id: of the node.
            name: of the volume there.
            bytes_per_s: the most to read, over time; None: as the node chooses.

        Raises:
            NotFound: there is no such node, or it has no such volume.
            Conflict: one is under way.
            InvalidArgument: the volume is no durable one.
            KVStoreError: as the node answers, or that it does not.
        """
        this = operation_id()  # of both attempts, where the first answer is lost

        async def ask(node: NodeRpc, volume_id: str) -> pb.VolumeCheck:
            request = pb.CheckVolumeRequest(operation_id=this, volume_id=volume_id, bytes_per_s=bytes_per_s or 0)
            return await node(node.stub.CheckVolume, request)

        return await self._ask(node_id, name, ask, changes=True)

    async def look(self, node_id: str, name: str) -> VolumeCheck:
        """How far it is, or what the last one found. Raises as ``begin`` does, but for ``Conflict``."""

        async def ask(node: NodeRpc, volume_id: str) -> pb.VolumeCheck:
            return await node(node.stub.DescribeCheck, pb.DescribeCheckRequest(volume_id=volume_id))

        return await self._ask(node_id, name, ask)

    async def cancel(self, node_id: str, name: str) -> VolumeCheck:
        """Ends it after the read that is under way, where there is one. Raises as ``look`` does."""

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


def _shown(found: pb.VolumeCheck) -> VolumeCheck:
    return VolumeCheck(
        volume_id=found.volume_id,
        state=STATES[found.state],
        blocks=found.blocks,
        checked_blocks=found.checked_blocks,
        good_blocks=found.good_blocks,
        bad_blocks=found.bad_blocks,
        rewritten_blocks=found.rewritten_blocks,
        unreadable_blocks=found.unreadable_blocks,
        gone_blocks=found.gone_blocks,
        checked_bytes=found.checked_bytes,
        bytes_per_s=found.bytes_per_s,
        began_ago_s=found.began_ago_ms / 1000,
        took_s=found.took_ms / 1000,
        why=found.why or None,
    )
