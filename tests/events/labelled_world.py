"""A store of labelled blocks in memory, its events, and the state of a router, for tests of ``kvstore events --model``."""

from __future__ import annotations

import hashlib
import struct

from kvclient import CacheSpec
from kvclient.events import BlockMirror
from kvclient.events.block_groups import GroupBlockId, xor
from kvclient.events.labels import BlockLabel, LabelNamespace
from kvproto.v1 import metadata_pb2 as pb
from kvproto.v1.common_pb2 import Tier
from kvstore.core.types import BlockKey
from kvstore.events.labelled import LabelledTranslator, engine_hash
from kvstore.events.wire import BlockRemoved, BlockStored, Event

SHARDS = [
    CacheSpec(model="m", block_tokens=4, layers=2, layer_block_bytes=64, shard_rank=rank, shard_count=2) for rank in range(2)
]
SPACE = LabelNamespace.make(SHARDS, engine_hash="sha256", kind="full_attention")
LENGTH = 5
VOLUMES = {1: Tier.TIER_DRAM, 2: Tier.TIER_NVME, 3: Tier.TIER_DRAM, 4: Tier.TIER_NVME}
MEDIA = {Tier.TIER_DRAM: "CPU", Tier.TIER_NVME: "STORAGE"}


def hash_of(chain: int, at: int) -> bytes:
    return hashlib.sha256(f"{chain if at >= 2 else 0} {at}".encode()).digest()  # two chains with a common prefix


def block_of(chain: int, at: int) -> GroupBlockId:
    return GroupBlockId(hash_of(chain, at)[:16])


def tokens_of(chain: int, at: int) -> list[int]:
    return [chain if at >= 2 else 0, at, 7, 7]


def label_of(chain: int, at: int) -> BlockLabel:
    parent = hash_of(chain, at - 1) if at else b""
    return BlockLabel(at, (hash_of(chain, at),), parent, struct.pack("<4I", *tokens_of(chain, at)))


BLOCKS = [(chain, at) for chain in range(2) for at in range(LENGTH) if chain == 0 or at >= 2]


def opened(number: int) -> pb.BlockEvent:
    return pb.BlockEvent(
        opened=pb.VolumeOpened(
            volume=number, volume_id=f"v{number}", node_id=f"n{number}", tier=VOLUMES[number], boot_id=b"b" * 16, served=True
        )
    )


class World:
    """A store of blocks with labels, a translator, and the state of a router."""

    def __init__(self, **how: object) -> None:
        self.mirror = BlockMirror()
        self.translator = LabelledTranslator(**how)  # type: ignore[arg-type]
        self.translator.use([SPACE])
        self.held: set[tuple[int, int, int, int]] = set()
        """Volume, shard (2: label), chain, position."""
        self.labels = {block_of(*one): label_of(*one) for one in BLOCKS}
        self.believed: set[tuple[int, str]] = set()
        self.tokens: dict[int, list[int]] = {}
        self.snapshot()

    def tell(self, message: pb.WatchBlocksResponse) -> None:
        self.translator.on_change(self.mirror, self.mirror.apply(message))

    def events(self, *events: pb.BlockEvent) -> None:
        self.tell(pb.WatchBlocksResponse(events=pb.BlockEvents(sequence=1, events=events)))

    def snapshot(self) -> None:
        self.tell(pb.WatchBlocksResponse(resync=pb.Resync(feed_id=b"f" * 16, reason=pb.RESYNC_REASON_ASKED)))
        self.events(*map(opened, VOLUMES))
        for one in sorted(self.held):
            self._tell_held(*one)
        self.tell(pb.WatchBlocksResponse(snapshot_end=pb.SnapshotEnd(sequence=1)))

    def _key(self, part: int, chain: int, at: int) -> tuple[bytes, BlockKey]:
        spec = SPACE.spec if part == 2 else SHARDS[part]
        return spec.namespace, BlockKey(xor(block_of(chain, at), spec.namespace))

    def _tell_held(self, volume: int, part: int, chain: int, at: int) -> None:
        namespace, key = self._key(part, chain, at)
        held = pb.BlocksHeld(volume=volume, namespace_id=namespace, keys=key, depths=[0 if part == 2 else at])
        self.events(pb.BlockEvent(held=held))

    def store(self, volume: int, part: int, chain: int, at: int) -> None:
        self.held.add((volume, part, chain, at))
        self._tell_held(volume, part, chain, at)

    def remove(self, volume: int, part: int, chain: int, at: int) -> None:
        self.held.discard((volume, part, chain, at))
        namespace, key = self._key(part, chain, at)
        self.events(pb.BlockEvent(removed=pb.BlocksRemoved(volume=volume, namespace_id=namespace, keys=key)))

    def update(self) -> None:
        """Publish until no label is missing that can be read."""
        while True:
            batches, wanted = self.translator.update(self.mirror, 2)
            for events in batches:
                self.take(events)
            if not wanted:
                return
            for namespace, blocks in wanted.items():
                self.translator.add_labels(namespace, {block: self.labels[block] for block in blocks})

    def take(self, events: list[Event]) -> None:
        for event in events:
            assert event.medium is not None
            pairs = {(one, event.medium) for one in event.block_hashes}
            if isinstance(event, BlockStored):
                assert len(event.token_ids) == event.block_size * len(event.block_hashes) == 4 * len(event.block_hashes)
                assert event.parent_block_hash is None or event.parent_block_hash in {one for one, _ in self.believed}
                assert not pairs & self.believed, "stored twice"
                self.believed |= pairs
                for at, one in enumerate(event.block_hashes):
                    self.tokens[one] = event.token_ids[4 * at : 4 * at + 4]
            else:
                assert isinstance(event, BlockRemoved)
                assert pairs <= self.believed, "removed without a store"
                self.believed -= pairs

    def expected(self) -> set[tuple[int, str]]:
        found: set[tuple[int, str]] = set()
        labelled = {(chain, at) for _, part, chain, at in self.held if part == 2}
        for chain in range(2):
            for at in range(LENGTH):
                name = (chain if at >= 2 else 0, at)
                parts = [
                    {VOLUMES[v] for v, part, *where in self.held if part == shard and tuple(where) == name} for shard in (0, 1)
                ]
                if not all(parts) or not (name in labelled or engine_hash(hash_of(*name)) in self.tokens):
                    break
                slowest = {tier for tiers in parts for tier in tiers}
                found |= {
                    (engine_hash(hash_of(*name)), MEDIA[tier])
                    for tier in slowest
                    if all(any(one <= tier for one in tiers) for tiers in parts)
                }
        return found


def whole(world: World, chain: int, stop: int, volume: int = 1) -> None:
    for at in range(stop):
        for part in (0, 1):
            world.store(volume, part, chain if at >= 2 else 0, at)
