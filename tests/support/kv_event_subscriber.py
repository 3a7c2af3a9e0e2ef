"""A subscriber as in vLLM's documentation: a SUB socket, and a replay if a number is missing; begins again if numbers do."""

from __future__ import annotations

import time

import msgspec
import zmq

from kvstore.events.wire import END_OF_REPLAY, AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch, number

WAIT_S = 30.0


class ZmqSubscriber:
    """Its state: (hash, medium) of all stored blocks."""

    def __init__(self, endpoint: str, replay: str, topic: str = "") -> None:
        self.context = zmq.Context()
        self.sub = self.context.socket(zmq.SUB)
        self.sub.subscribe(topic)
        self.sub.connect(endpoint)
        self.dealer = self.context.socket(zmq.DEALER)
        self.dealer.connect(replay)
        self.topic = topic
        self.last = self.heard = -1
        self.believed: set[tuple[object, str | None]] = set()
        self.sizes: set[int] = set()
        self.tokens: dict[object, list[int]] = {}
        self.replays = 0
        self.begun_again = 0
        self.decode = msgspec.msgpack.Decoder(KVEventBatch).decode

    def close(self) -> None:
        self.context.destroy(linger=0)

    def take(self, sequence: int, payload: bytes) -> None:
        self.last = sequence
        for event in self.decode(payload).events:
            if isinstance(event, AllBlocksCleared):
                self.believed.clear()
            elif isinstance(event, BlockStored):
                self.sizes.add(event.block_size)
                for at, one in enumerate(event.block_hashes if event.token_ids else ()):
                    self.tokens[one] = event.token_ids[at * event.block_size : (at + 1) * event.block_size]
                self.believed |= {(one, event.medium) for one in event.block_hashes}
            else:
                assert isinstance(event, BlockRemoved)
                self.believed -= {(one, event.medium) for one in event.block_hashes}

    def replay(self, first: int) -> list[tuple[int, bytes]]:
        """Return the batches of the publisher from a number on."""
        self.replays += 1
        self.dealer.send_multipart((b"", number(first)))
        found = []
        while True:
            assert self.dealer.poll(int(WAIT_S * 1000)), "no replay"
            empty, topic, sequence, payload = self.dealer.recv_multipart()
            assert empty == b""
            if sequence == END_OF_REPLAY:
                assert topic == payload == b""
                return found
            assert topic == self.topic.encode()
            found.append((int.from_bytes(sequence, "big"), payload))

    def catch_up(self) -> None:
        """Return all events from the last batch on."""
        for sequence, payload in self.replay(self.last + 1):
            assert sequence > self.last
            self.take(sequence, payload)

    def read(self, timeout_s: float = 0.05) -> bool:
        """Receive one message, if there is one."""
        if not self.sub.poll(int(timeout_s * 1000)):
            return False
        topic, sequence, payload = self.sub.recv_multipart()
        assert topic == self.topic.encode()
        heard = int.from_bytes(sequence, "big")
        if heard < self.heard:  # the publisher began again
            self.believed.clear()
            self.begun_again += 1
            self.last = -1
        self.heard = heard
        if heard > self.last + 1:
            self.catch_up()
        if heard == self.last + 1:
            self.take(heard, payload)
        return True

    def until(self, expected: set[tuple[object, str | None]]) -> None:
        end_s = time.monotonic() + WAIT_S
        while self.believed != expected:
            self.read()
            assert time.monotonic() < end_s, f"{len(self.believed)} blocks, not {len(expected)}"
