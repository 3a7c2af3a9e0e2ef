"""``kvstore.events`` and vLLM's own publisher and types: the same bytes, both ways."""

from __future__ import annotations

import time

import msgspec
import pytest
import zmq

pytest.importorskip("vllm.distributed.kv_events")

from vllm.distributed import kv_events as theirs

from kvclient.events import BlockMirror
from kvproto.v1 import metadata_pb2 as pb
from kvproto.v1.common_pb2 import BlockRun, Tier
from kvstore.config.events import EventsConfig
from kvstore.events import wire as ours
from kvstore.events.publisher import EventPublisher
from kvstore.events.translation import MEDIA, Translator, last_eight_bytes
from kvstore.observe.counters import Counters
from kvstore.testing.index.model import Chain

WAIT_MS = 30_000
CHAIN = Chain.of(b"n" * 16, range(40))
NUMBERS = [int.from_bytes(key[8:], "big") for key in CHAIN.keys]
CASES = [
    (
        ours.BlockStored(NUMBERS[:3], None, [], 64, None, "CPU", None),
        theirs.BlockStored(NUMBERS[:3], None, [], 64, None, theirs.MEDIUM_CPU, None),
    ),
    (
        ours.BlockStored(list(CHAIN.keys[3:5]), CHAIN.keys[2], [], 0, None, "GPU", None),
        theirs.BlockStored(list(CHAIN.keys[3:5]), CHAIN.keys[2], [], 0, None, theirs.MEDIUM_GPU, None),
    ),
    (
        ours.BlockStored(
            NUMBERS[:2],
            NUMBERS[9],
            [1, 2],
            1,
            None,
            "CPU",
            "adapter",
            extra_keys=[("adapter",), None],
            kv_cache_spec_kind="full_attention",
        ),
        theirs.BlockStored(
            NUMBERS[:2], NUMBERS[9], [1, 2], 1, None, "CPU", "adapter", [("adapter",), None], kv_cache_spec_kind="full_attention"
        ),
    ),
    (ours.BlockRemoved(NUMBERS[:2], "STORAGE"), theirs.BlockRemoved(NUMBERS[:2], theirs.MEDIUM_STORAGE)),
    (ours.AllBlocksCleared(), theirs.AllBlocksCleared()),
]


def test_equal_bytes_and_their_types_read_them() -> None:
    ours_all, theirs_all = [case[0] for case in CASES], [case[1] for case in CASES]
    payload = ours.encode(ours.KVEventBatch(1234.5, ours_all, 0))
    assert payload == msgspec.msgpack.Encoder().encode(theirs.KVEventBatch(ts=1234.5, events=theirs_all, data_parallel_rank=0))
    read = msgspec.msgpack.Decoder(theirs.KVEventBatch).decode(payload)
    assert read == theirs.KVEventBatch(ts=1234.5, events=theirs_all, data_parallel_rank=0)
    assert set(MEDIA.values()) == {theirs.MEDIUM_GPU, theirs.MEDIUM_CPU, theirs.MEDIUM_STORAGE}
    assert theirs.ZmqEventPublisher.END_SEQ == ours.END_OF_REPLAY


def test_hashes_are_made_as_vllm_makes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

    monkeypatch.delenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", raising=False)
    assert last_eight_bytes(CHAIN.keys[0]) == maybe_convert_block_hash(CHAIN.keys[0])


def frames(endpoint: str, request: bytes) -> list[list[bytes]]:
    """All that a replay answers, to the last frame."""
    context = zmq.Context()
    try:
        dealer = context.socket(zmq.DEALER)
        dealer.connect(endpoint)
        found: list[list[bytes]] = []
        dealer.send_multipart((b"", request))
        while not found or found[-1][2] != theirs.ZmqEventPublisher.END_SEQ:
            assert dealer.poll(WAIT_MS), "no answer"
            found.append(dealer.recv_multipart())
        return found
    finally:
        context.destroy(linger=0)


def free_port() -> int:
    with zmq.Context() as context, context.socket(zmq.PAIR) as socket:
        return socket.bind_to_random_port("tcp://127.0.0.1")


def test_both_publishers_say_the_same_on_both_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same events, at the same time by the clock, live and replayed: equal frames."""
    config = EventsConfig(metadata="127.0.0.1:7400", zmq="tcp://127.0.0.1:*", replay="tcp://127.0.0.1:*", topic="kv@pod@model")
    monkeypatch.setattr(time, "time", lambda: 1234.5)
    translator = Translator(last_eight_bytes, {CHAIN.namespace: 64}.__getitem__)
    publisher = EventPublisher(config, translator.everything, Counters())
    replay = f"tcp://127.0.0.1:{free_port()}"
    vllm = theirs.ZmqEventPublisher(
        0, endpoint=f"ipc:///tmp/kv-events-{free_port()}", replay_endpoint=replay, topic="kv@pod@model"
    )
    try:
        mirror = BlockMirror()
        mirror.apply(pb.WatchBlocksResponse(resync=pb.Resync(feed_id=b"f" * 16, reason=pb.RESYNC_REASON_ASKED)))
        volume = pb.VolumeOpened(volume=1, volume_id="v", node_id="n", tier=Tier.TIER_DRAM, boot_id=b"b" * 16, served=True)
        mirror.apply(pb.WatchBlocksResponse(events=pb.BlockEvents(events=[pb.BlockEvent(opened=volume)])))
        mirror.apply(pb.WatchBlocksResponse(snapshot_end=pb.SnapshotEnd(sequence=1)))
        publisher.publish(lambda: [[]])

        def tell(event: pb.BlockEvent) -> None:
            change = mirror.apply(pb.WatchBlocksResponse(events=pb.BlockEvents(sequence=2, events=[event])))
            publisher.publish(lambda: translator.take(mirror, change))

        run = BlockRun(namespace_id=CHAIN.namespace, parent=CHAIN.keys[9], depth=10, keys=b"".join(CHAIN.keys[10:30]))
        stored = pb.BlockEvent(stored=pb.BlocksStored(volume=1, runs=[run]))
        tell(stored)
        gone = pb.BlocksRemoved(volume=1, namespace_id=CHAIN.namespace, keys=b"".join(CHAIN.keys[25:30]))
        removed = pb.BlockEvent(removed=gone)
        tell(removed)
        for events in (
            [],
            [theirs.BlockStored(NUMBERS[10:30], NUMBERS[9], [], 64, None, theirs.MEDIUM_CPU, None)],
            [theirs.BlockRemoved(NUMBERS[25:30], theirs.MEDIUM_CPU)],
        ):
            vllm.publish(theirs.KVEventBatch(ts=1234.5, events=events))
        replayed = frames(replay, bytes(8))
        while len(replayed) < 4:  # its thread has not published all yet
            replayed = frames(replay, bytes(8))
        assert frames(publisher.replay_endpoint, bytes(8)) == replayed
        assert frames(publisher.replay_endpoint, (2).to_bytes(8, "big")) == frames(replay, (2).to_bytes(8, "big"))
        assert frames(publisher.replay_endpoint, (9).to_bytes(8, "big")) == frames(replay, (9).to_bytes(8, "big"))
    finally:
        publisher.close()
        vllm.shutdown()
