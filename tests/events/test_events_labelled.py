"""Tests of the events of labelled blocks, without sockets."""

from __future__ import annotations

import struct
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from labelled_world import BLOCKS, LENGTH, MEDIA, SHARDS, SPACE, VOLUMES, World, block_of, hash_of, label_of, tokens_of, whole

from kvclient import CacheSpec
from kvclient.events.block_groups import BlockGroup, xor
from kvclient.events.labels import BlockLabel, LabelNamespace
from kvproto.v1 import metadata_pb2 as pb
from kvstore.core.errors import InvalidArgument
from kvstore.core.types import BlockKey
from kvstore.events import labelled
from kvstore.events.labelled import engine_hash
from kvstore.events.wire import Event

places = st.tuples(st.sampled_from(list(VOLUMES)), st.integers(0, 2), st.sampled_from(BLOCKS))
steps = st.one_of(
    st.tuples(st.just("store"), places),
    st.tuples(st.just("remove"), places),
    st.tuples(st.just("update"), st.none()),
    st.tuples(st.just("snapshot"), st.none()),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(places, max_size=30), st.lists(steps, max_size=30))
def test_published_blocks_are_whole_labelled_prefixes(
    first: list[tuple[int, int, tuple[int, int]]], happened: list[tuple[str, tuple[int, int, tuple[int, int]] | None]]
) -> None:
    world = World()
    for one in BLOCKS:
        world.store(1, 2, *one)  # all labels stay; evicted labels are tested below
    for volume, part, where in first:
        world.store(volume, part, *where)
    for what, place in happened:
        if place is not None and what == "store":
            world.store(place[0], place[1], *place[2])
        elif place is not None and place[1] != 2:
            world.remove(place[0], place[1], *place[2])
        elif what == "snapshot":
            world.snapshot()
        elif what == "update":
            world.update()
            assert world.believed == world.expected()
    world.update()
    assert world.believed == world.expected()
    late = World()
    for events in world.translator.everything(1_000):
        late.take(events)
    assert late.believed == world.believed
    assert len(world.translator) == len({one for one, _ in world.believed})
    known = {engine_hash(hash_of(*one)): tokens_of(*one) for one in BLOCKS}
    assert world.tokens.items() <= known.items()


def test_label_that_comes_late_publishes_its_block_and_later() -> None:
    world = World()
    whole(world, 0, 4)
    for at in (0, 2, 3):
        world.store(1, 2, 0, at)
    world.update()
    assert {one for one, _ in world.believed} == {engine_hash(hash_of(0, 0))}
    assert world.translator.unlabelled == 1
    world.store(1, 2, 0, 1)
    world.update()
    assert {one for one, _ in world.believed} == {engine_hash(hash_of(0, at)) for at in range(4)}
    assert world.translator.unlabelled == 0


def test_label_evicted_keeps_its_block_published() -> None:
    world = World()
    whole(world, 0, 3)
    for at in range(3):
        world.store(1, 2, 0, at)
    world.update()
    for at in range(3):
        world.remove(1, 2, 0, at)
    world.update()
    assert len(world.believed) == 3
    world.remove(1, 0, 0, 1)
    world.update()
    assert {one for one, _ in world.believed} == {engine_hash(hash_of(0, 0))}
    world.store(1, 0, 0, 1)  # its label was evicted
    world.update()
    assert {one for one, _ in world.believed} == {engine_hash(hash_of(0, 0))}


def test_labels_that_cannot_be_read_are_asked_for_after_refresh() -> None:
    world = World()
    whole(world, 0, 1)
    world.store(1, 2, 0, 0)
    _, wanted = world.translator.update(world.mirror, 10)
    world.translator.give_up(SPACE.spec.namespace, wanted[SPACE.spec.namespace])
    assert world.translator.update(world.mirror, 10) == ([], {})
    world.translator.refresh()
    assert world.translator.update(world.mirror, 10)[1] == wanted


def test_events_are_runs_and_parents_come_first() -> None:
    world = World()
    for chain in (1, 0):
        whole(world, chain, LENGTH)
    for one in reversed(BLOCKS):
        world.store(1, 2, *one)
    published: list[Event] = []
    take = world.take
    world.take = lambda events: (published.extend(events), take(events))  # type: ignore[method-assign,assignment,return-value]
    world.update()
    world.translator.refresh()
    events = [event for batch in world.translator.everything(10) for event in batch]
    assert sorted(len(event.block_hashes) for event in events) == [3, 5]
    assert all(event.kv_cache_spec_kind == "full_attention" and event.group_idx is None for event in events)
    assert events[1].parent_block_hash == engine_hash(hash_of(0, 1))
    assert events[1].token_ids[:4] in (tokens_of(0, 2), tokens_of(1, 2))


def test_volumes_outside_the_filter_do_not_count_for_blocks() -> None:
    world = World(accept=lambda volume: volume.node_id == "n1")
    whole(world, 0, 2, volume=3)
    for at in range(2):
        world.store(3, 2, 0, at)  # labels are read from anywhere
    world.update()
    assert world.believed == set()
    whole(world, 0, 1, volume=1)
    world.update()
    assert world.believed == {(engine_hash(hash_of(0, 0)), "CPU")}


def test_equal_hash_in_two_namespaces_is_removed_with_the_last() -> None:
    other = [CacheSpec(model="m", block_tokens=4, layers=2, layer_block_bytes=64, weights_epoch="2")]
    second = LabelNamespace.make(other, engine_hash="sha256")
    world = World()
    whole(world, 0, 1)
    world.store(1, 2, 0, 0)
    world.update()
    world.translator.use([second])
    world.snapshot()
    key = BlockKey(xor(block_of(0, 0), other[0].namespace))
    stored = pb.BlocksHeld(volume=1, namespace_id=other[0].namespace, keys=key, depths=[0])
    label = pb.BlocksHeld(volume=1, namespace_id=second.spec.namespace, keys=second.key(block_of(0, 0)), depths=[0])
    world.events(pb.BlockEvent(held=stored), pb.BlockEvent(held=label))
    world.update()
    assert len(world.believed) == 1
    world.remove(1, 0, 0, 0)
    world.update()
    assert len(world.believed) == 1
    world.events(pb.BlockEvent(removed=pb.BlocksRemoved(volume=1, namespace_id=other[0].namespace, keys=key)))
    world.update()
    assert world.believed == set()


def test_held_tiers_are_those_that_serve_all_parts() -> None:
    world, group = World(), BlockGroup([spec.namespace for spec in SHARDS])
    block, dram, nvme = block_of(0, 0), 1 << 2, 1 << 3
    for volume, part, expected in ((1, 0, 0), (2, 1, nvme), (1, 1, dram | nvme), (2, 0, dram | nvme)):
        world.store(volume, part, 0, 0)
        assert group.held_tiers(world.mirror, block) == expected


@pytest.mark.parametrize(
    "label",
    [
        label_of(0, 0),
        label_of(0, 3),
        BlockLabel(9, (b"a" * 32, b"b" * 32), b"p" * 32, bytes(32), "adapter", (["adapter", ["image", -3]], None)),
    ],
    ids=["head", "child", "extras"],
)
def test_label_survives_encoding(label: BlockLabel) -> None:
    size = SPACE.spec.layer_block_bytes
    read = BlockLabel.decode(label.encode(size))
    assert read == label
    assert len(label.encode(size)) == size
    with pytest.raises(InvalidArgument):
        label.encode(40)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200), st.booleans())
def test_label_of_any_bytes_is_refused_or_read(block: bytes, magic: bool) -> None:
    try:
        BlockLabel.decode(b"KVLB" + block if magic else block)
    except InvalidArgument:
        return


def test_blocks_of_one_hash_are_published_once() -> None:
    """Engines may compute equal hashes for different KV: adapters of one name."""
    world = World()
    world.labels[block_of(1, 2)] = label_of(0, 2)
    for at in ((0, 0), (0, 1), (0, 2), (1, 2)):
        for part in range(3):
            world.store(1, part, *at)
    world.update()
    last = engine_hash(hash_of(0, 2)), MEDIA[VOLUMES[1]]
    assert len(world.believed) == 3
    assert world.translator.unlabelled == 0
    for gone, kept in (((0, 2), True), ((1, 2), False)):
        world.remove(1, 0, *gone)
        world.update()
        assert (last in world.believed) is kept


def test_longer_blocks_publish_only_new_hashes() -> None:
    """Engines may store several hashes in one block, beside engines that store one."""
    world = World()
    two = BlockLabel(1, (hash_of(0, 0), hash_of(0, 1)), b"", struct.pack("<8I", *tokens_of(0, 0), *tokens_of(0, 1)))
    world.labels[block_of(1, 2)] = two
    for at in ((0, 0), (1, 2)):
        for part in range(3):
            world.store(1, part, *at)
        world.update()
    assert {one for one, _ in world.believed} == {engine_hash(hash_of(0, 0)), engine_hash(hash_of(0, 1))}
    world.remove(1, 0, 0, 0)
    world.update()
    assert len(world.believed) == 2
    world.remove(1, 0, 1, 2)
    world.update()
    assert not world.believed


def test_label_that_cannot_be_published_is_refused() -> None:
    for rest in ('["\\ud800",null]', '["",[18446744073709551616]]', '["",[[[[[[1]]]]]]]', '["",[null,null]]'):
        header = struct.pack("<4sIHHHIH", b"KVLB", 0, 1, 8, 0, 1, len(rest))
        with pytest.raises(InvalidArgument):
            BlockLabel.decode(header + bytes(8 + 4) + rest.encode())


def test_labels_of_another_tenant_are_not_read() -> None:
    for change in ({"tenant": "t"}, {"weights_epoch": "2"}, {"salt": b"s"}):
        foreign = replace(SPACE.spec, **change)
        assert LabelNamespace.read(foreign, [foreign, *SHARDS]) is None


def test_label_with_deep_extra_keys_is_refused() -> None:
    header = struct.pack("<4sIHHHIH", b"KVLB", 0, 1, 8, 0, 1, 60_000)
    with pytest.raises(InvalidArgument):
        BlockLabel.decode(header + bytes(8 + 4) + b"[" * 60_000)


def test_label_namespace_of_huge_blocks_is_not_read() -> None:
    huge = replace(SPACE.spec, layer_block_bytes=2 << 20)
    assert LabelNamespace.read(huge, [huge, *SHARDS]) is None


def test_label_namespace_is_read_from_its_spec() -> None:
    assert LabelNamespace.read(SPACE.spec, [SPACE.spec, *SHARDS]) == SPACE
    assert LabelNamespace.read(SPACE.spec, SHARDS[:1]) is None
    assert LabelNamespace.read(SHARDS[0], SHARDS) is None
    assert LabelNamespace.make(SHARDS, engine_hash="sha256", kind="sliding_window").kind == ""
    many = [CacheSpec(model="m", block_tokens=4, layers=2, layer_block_bytes=64, shard_rank=r, shard_count=64) for r in range(64)]
    with pytest.raises(InvalidArgument, match="too many namespaces"):
        LabelNamespace.make(many, engine_hash="sha256")


def test_many_changes_between_updates_are_read_from_the_mirror(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(labelled, "_MOST_CHANGES", 3)
    world = World()
    for one in BLOCKS:
        for part in range(3):
            world.store(1, part, *one)
    world.update()
    assert len(world.believed) == len(BLOCKS)
    for one in BLOCKS[1:]:
        world.remove(1, 0, *one)
    world.update()
    assert world.believed == world.expected()


def test_labels_are_bounded_in_bytes() -> None:
    world = World(most_label_bytes=3_000)
    for one in BLOCKS:
        for part in range(3):
            world.store(1, part, *one)
    _, wanted = world.translator.update(world.mirror, 100)
    mine, blocks = SPACE.spec.namespace, wanted[SPACE.spec.namespace]
    refused = world.translator.add_labels(mine, {block: world.labels[block] for block in blocks})
    assert refused == blocks[3:]
    assert not world.translator.has_space
    world.translator.update(world.mirror, 100)
    assert world.translator.unlabelled == len(refused)
    for one in BLOCKS:
        world.remove(1, 0, *one)
    world.translator.update(world.mirror, 100)
    assert world.translator.label_bytes == 0
