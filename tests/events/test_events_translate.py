"""Tests of the translation into vLLM's format, without sockets."""

from __future__ import annotations

from collections.abc import Iterable

from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvclient.events import BlockMirror
from kvproto.v1 import metadata_pb2 as pb
from kvproto.v1.common_pb2 import BlockRun, Tier
from kvstore.events.translation import MEDIA, Translator, last_eight_bytes, whole_key
from kvstore.events.wire import BlockRemoved, BlockStored, Event
from kvstore.testing.index.model import Chain

NAMESPACE, OTHER = b"n" * 16, b"o" * 16
LENGTH = 12
CHAINS = [
    Chain.of(NAMESPACE, ["a"] * LENGTH),
    Chain.of(NAMESPACE, ["a"] * 4 + ["b"] * (LENGTH - 4)),
    Chain.of(OTHER, ["c"] * LENGTH),
]
TIERS = [Tier.TIER_HBM, Tier.TIER_DRAM, Tier.TIER_DRAM, Tier.TIER_NVME]
TOKENS = {NAMESPACE: 64, OTHER: 16}


class Believer:
    """A router: which hashes are in which medium, by the letter of the events."""

    def __init__(self) -> None:
        self.blocks: dict[str, set[object]] = {medium: set() for medium in MEDIA.values()}

    def take(self, batches: Iterable[list[Event]]) -> None:
        for events in batches:
            assert events
            for event in events:
                if isinstance(event, BlockStored):
                    assert not self.blocks[event.medium] & set(event.block_hashes), "told twice"
                    self.blocks[event.medium] |= set(event.block_hashes)
                else:
                    assert isinstance(event, BlockRemoved)
                    assert self.blocks[event.medium] >= set(event.block_hashes), "never told"
                    self.blocks[event.medium] -= set(event.block_hashes)


def message(*events: pb.BlockEvent) -> pb.WatchBlocksResponse:
    return pb.WatchBlocksResponse(events=pb.BlockEvents(sequence=1, events=events))


def opened(number: int, *, served: bool = True) -> pb.BlockEvent:
    volume = pb.VolumeOpened(
        volume=number, volume_id=f"v{number}", node_id="n", tier=TIERS[number % len(TIERS)], boot_id=b"b" * 16, served=served
    )
    return pb.BlockEvent(opened=volume)


def run_message(chain: Chain, start: int, end: int) -> BlockRun:
    run = chain.run(start, end)
    return BlockRun(namespace_id=run.namespace, parent=run.parent or b"", depth=run.depth, keys=b"".join(run.keys))


volumes = st.integers(1, 4)
chains = st.integers(0, len(CHAINS) - 1)
spans = st.tuples(st.integers(0, LENGTH), st.integers(0, LENGTH)).map(sorted).filter(lambda span: span[0] < span[1])
steps = st.one_of(
    st.tuples(st.just("stored"), volumes, chains, spans),
    st.tuples(st.just("removed"), volumes, chains, spans),
    st.tuples(st.just("served"), volumes, st.booleans(), st.none()),
    st.tuples(st.just("closed"), volumes, st.none(), st.none()),
    st.tuples(st.just("opened"), volumes, st.none(), st.none()),
    st.tuples(st.just("anew"), st.none(), st.none(), st.none()),
)


def in_media(mirror: BlockMirror) -> dict[str, set[object]]:
    found: dict[str, set[object]] = {medium: set() for medium in MEDIA.values()}
    for key in mirror:
        for volume in mirror.holders(key):
            found[MEDIA[volume.tier]].add(key)
    return found


@settings(max_examples=150, deadline=None)
@example([("stored", 1, 0, [0, 1]), ("served", 1, False, None), ("opened", 1, None, None)])
@given(st.lists(steps, max_size=25))
def test_translation_state_equals_mirror(happened: list[tuple[str, int, object, object]]) -> None:
    mirror, translator, believer = BlockMirror(), Translator(whole_key, TOKENS.__getitem__), Believer()

    def take(one: pb.WatchBlocksResponse) -> None:
        believer.take(translator.take(mirror, mirror.apply(one)))

    def snapshot() -> None:
        take(pb.WatchBlocksResponse(resync=pb.Resync(feed_id=b"f" * 16, reason=pb.RESYNC_REASON_ASKED)))
        take(message(*[opened(number) for number in range(1, 5)]))
        held = pb.BlocksHeld(volume=3, namespace_id=NAMESPACE, keys=b"".join(CHAINS[0].keys), depths=range(LENGTH))
        take(message(pb.BlockEvent(held=held)))
        take(pb.WatchBlocksResponse(snapshot_end=pb.SnapshotEnd(sequence=1)))

    snapshot()
    for what, number, choice, span in happened:
        if what == "anew":
            snapshot()
        elif what == "opened":
            take(message(opened(number)))
        elif what == "closed":
            take(message(pb.BlockEvent(closed=pb.VolumeClosed(volume=number))))
        elif what == "served":
            take(message(pb.BlockEvent(served=pb.VolumeServed(volume=number, served=choice))))
        elif what == "stored":
            take(message(pb.BlockEvent(stored=pb.BlocksStored(volume=number, runs=[run_message(CHAINS[choice], *span)]))))
        else:
            chain = CHAINS[choice]
            gone = pb.BlocksRemoved(volume=number, namespace_id=chain.namespace, keys=b"".join(chain.keys[slice(*span)]))
            take(message(pb.BlockEvent(removed=gone)))
        assert believer.blocks == in_media(mirror)
    late = Believer()
    late.take(translator.everything(1_000))
    assert late.blocks == believer.blocks


def begun() -> tuple[BlockMirror, Translator]:
    mirror, translator = BlockMirror(), Translator(last_eight_bytes, TOKENS.__getitem__)
    mirror.apply(pb.WatchBlocksResponse(resync=pb.Resync(feed_id=b"f" * 16, reason=pb.RESYNC_REASON_ASKED)))
    mirror.apply(message(opened(1), opened(2), opened(3)))
    change = mirror.apply(pb.WatchBlocksResponse(snapshot_end=pb.SnapshotEnd(sequence=1)))
    assert translator.take(mirror, change) == []
    return mirror, translator


def test_translation_keeps_parents() -> None:
    mirror, translator = begun()
    chain = CHAINS[0]
    hashes = [int.from_bytes(key[8:], "big") for key in chain.keys]

    def store(volume: int, start: int, end: int) -> list[list[Event]]:
        stored = pb.BlocksStored(volume=volume, runs=[run_message(chain, start, end)])
        return translator.take(mirror, mirror.apply(message(pb.BlockEvent(stored=stored))))

    assert store(1, 0, 4) == [[BlockStored(hashes[:4], None, [], 64, None, "CPU", None)]]
    assert store(1, 6, 8) == [[BlockStored(hashes[6:8], hashes[5], [], 64, None, "CPU", None)]]
    # only what is new to the medium, in as many pieces as that is
    assert store(2, 2, 12) == [
        [
            BlockStored(hashes[4:6], hashes[3], [], 64, None, "CPU", None),
            BlockStored(hashes[8:12], hashes[7], [], 64, None, "CPU", None),
        ]
    ]
    assert store(3, 0, 2) == [[BlockStored(hashes[:2], None, [], 64, None, "STORAGE", None)]]


def test_translation_batches_are_bounded() -> None:
    mirror, translator = begun()
    long = Chain.of(NAMESPACE, range(10_000))
    stored = pb.BlocksStored(volume=1, runs=[run_message(long, 0, 10_000)])
    batches = translator.take(mirror, mirror.apply(message(pb.BlockEvent(stored=stored))))
    sizes = [sum(len(event.block_hashes) for event in batch) for batch in batches]
    assert sum(sizes) == 10_000
    assert max(sizes) <= 4_096
    assert [event.parent_block_hash for batch in batches for event in batch][1] == int.from_bytes(long.keys[1_023][8:], "big")
    assert len(translator.everything(1_000)) == 3
    assert len(translator.everything(1)) == 1
    part = pb.BlocksRemoved(volume=1, namespace_id=NAMESPACE, keys=b"".join(long.keys[10:]))
    assert (
        sum(
            len(event.block_hashes)
            for batch in translator.take(mirror, mirror.apply(message(pb.BlockEvent(removed=part))))
            for event in batch
        )
        == 9_990
    )
    closed = mirror.apply(message(pb.BlockEvent(closed=pb.VolumeClosed(volume=1))))
    gone = translator.take(mirror, closed)
    assert {one for batch in gone for event in batch for one in event.block_hashes} == {
        int.from_bytes(key[8:], "big") for key in long.keys[:10]
    }
