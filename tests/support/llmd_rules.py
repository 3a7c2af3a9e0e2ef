"""The rules by which llm-d's router (August 2026) reads KV events, written from its documented behaviour, without its Go code.

Events are arrays or maps. A hash is an integer, or bytes of which the last eight count. The topic names pod and model. The name
of an adapter replaces the model's. The router hashes tokens itself, in blocks of its own size, and learns which of its blocks a
hash of the engine means. An event is dropped if its parent is unknown, its group is not a main attention, or its tokens do not
fill its blocks. Equal stores of a pod, medium and group are counted, and only the last removal counts. A clear event wipes the
whole pod, all media. A subscriber requests a replay from 0 and insists on 0, 1, 2, ... A number below the last wipes the pod.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from typing import Any

import msgspec
import zmq

from kvstore.events.wire import END_OF_REPLAY, number

MAIN = {"full_attention", "mla_attention", "sink_full_attention"}
STORED = ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name", "extra_keys")
STORED += ("group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window")
REMOVED = ("block_hashes", "medium", "group_idx")
WAIT_MS = 20_000


def as_number(raw: int | bytes) -> int:
    """A hash of the engine as the router keeps it."""
    return raw % 2**64 if isinstance(raw, int) else int.from_bytes(raw[-8:], "big")


def fields_of(event: Any) -> dict[str, Any]:
    """An event as a map, whichever way it was encoded."""
    if isinstance(event, dict):
        return event
    names = {"BlockStored": STORED, "BlockRemoved": REMOVED}.get(event[0], ())
    return {"type": event[0], **dict(zip(names, event[1:], strict=False))}


class LlmdIndex:
    """Which pod has which block in which medium.

    Args:
        block_size: tokens of the router's own blocks.
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.pods: dict[bytes, set[tuple[str, str, int | None]]] = {}
        """By block of the router: pod, medium and group."""
        self.blocks_of: dict[int, list[bytes]] = {}
        """By the engine's hash: blocks of the router."""
        self.counts: Counter[tuple[str, str, int | None, int]] = Counter()
        self.kinds: dict[tuple[str, int], str] = {}
        self.dropped: Counter[str] = Counter()

    def keys(self, model: str, tokens: list[int], parent: bytes = b"", extras: list[Any] | None = None) -> list[bytes]:
        """Hash tokens as the router would; any chain of hashes is as good as its own."""
        found, per = [], 0 if extras is None else max(1, len(tokens) // self.block_size // len(extras))
        for at in range(len(tokens) // self.block_size):
            images = [] if extras is None else [one for one in extras[at // per] or () if not isinstance(one, str)]
            block = tokens[at * self.block_size : (at + 1) * self.block_size]
            parent = hashlib.sha256(repr((parent or model, block, images)).encode()).digest()
            found.append(parent)
        return found

    def clear(self, pod: str) -> None:
        """Forget all of a pod."""
        for holders in self.pods.values():
            holders -= {one for one in holders if one[0] == pod}
        for counted in [one for one in self.counts if one[0] == pod]:
            del self.counts[counted]

    def take(self, topic: str, payload: bytes) -> None:
        """Apply one message."""
        parts = topic.split("@")
        pod, model = (parts[1], parts[2]) if len(parts) == 3 else (topic, "")
        _, events, *_ = msgspec.msgpack.decode(payload)
        for event in map(fields_of, events):
            if event["type"] == "AllBlocksCleared":
                self.clear(pod)
            elif event["type"] == "BlockRemoved":
                self._remove(pod, event)
            else:
                self._store(pod, event.get("lora_name") or model, event)

    def _store(self, pod: str, model: str, event: dict[str, Any]) -> None:
        medium, group = (event.get("medium") or "gpu").lower(), event.get("group_idx")
        tokens, hashes = event["token_ids"], [as_number(one) for one in event["block_hashes"]]
        if group is not None:
            kind = event.get("kv_cache_spec_kind") or self.kinds.get((pod, group), "")
            self.kinds[pod, group] = kind
            if kind not in MAIN:
                self.dropped["kind"] += 1
                return
            if tokens and len(tokens) != event["block_size"] * len(hashes):
                self.dropped["tokens do not fill the blocks"] += 1
                return
        parent = b""
        if event.get("parent_block_hash"):
            known = self.blocks_of.get(as_number(event["parent_block_hash"]))
            if known is None:
                self.dropped["parent"] += 1
                return
            parent = known[-1]
        found = self.keys(model, tokens, parent, event.get("extra_keys"))
        if not found and not tokens:
            found = [one for own in hashes for one in self.blocks_of.get(own, ())]
        elif found:
            each = len(found) / len(hashes)
            for at, own in enumerate(hashes):
                self.blocks_of[own] = found[int(at * each) : max(int((at + 1) * each), int(at * each) + 1)]
        if not found:
            self.dropped["no blocks"] += 1
            return
        for one in found:
            self.pods.setdefault(one, set()).add((pod, medium, group))
        self.counts.update((pod, medium, group, own) for own in hashes)

    def _remove(self, pod: str, event: dict[str, Any]) -> None:
        medium, group = (event.get("medium") or "gpu").lower(), event.get("group_idx")
        if group is not None and self.kinds.get((pod, group), "") not in MAIN:
            self.dropped["kind"] += 1
            return
        for own in map(as_number, event["block_hashes"]):
            counted = (pod, medium, group, own)
            if self.counts[counted] > 1:
                self.counts[counted] -= 1
                continue
            self.counts.pop(counted, None)
            for one in self.blocks_of.get(own, ()):
                self.pods.get(one, set()).discard((pod, medium, group))
            if not any(self.pods.get(one) for one in self.blocks_of.get(own, ())):
                self.blocks_of.pop(own, None)

    def prefix(self, model: str, tokens: list[int]) -> dict[tuple[str, str], int]:
        """Return by pod and medium: leading tokens of a prompt that are there without a gap."""
        found: dict[tuple[str, str], int] = {}
        for at, key in enumerate(self.keys(model, tokens)):
            for pod, medium, _ in self.pods.get(key, ()):
                if found.get((pod, medium), 0) == at * self.block_size:
                    found[pod, medium] = (at + 1) * self.block_size
        return found


class LlmdSubscriber:
    """Reads one stream, with replays.

    Args:
        index: receives the messages.
        endpoint: of the PUB socket.
        replay: of the ROUTER socket.
        topic: prefix of topics.
    """

    def __init__(self, index: LlmdIndex, endpoint: str, replay: str, topic: str = "kv@") -> None:
        self.index = index
        self.context = zmq.Context()
        self.sub = self.context.socket(zmq.SUB)
        self.sub.subscribe(topic)
        self.sub.connect(endpoint)
        self.replay_endpoint = replay
        self.last: int | None = None
        self.last_live: int | None = None
        self.resets = 0
        self.request(0)

    def close(self) -> None:
        """Disconnect."""
        self.context.destroy(linger=0)

    def request(self, first: int) -> bool:
        """Request a replay; False: it was incomplete, and everything is dropped."""
        with self.context.socket(zmq.DEALER) as dealer:
            dealer.connect(self.replay_endpoint)
            dealer.send_multipart((b"", number(first)))
            expected, topic = first, b""
            while True:
                assert dealer.poll(WAIT_MS), "no replay"
                *_, topic, sequence, payload = dealer.recv_multipart()
                if sequence == END_OF_REPLAY:
                    if expected == first and first:
                        self.drop()
                        return False
                    return True
                if int.from_bytes(sequence, "big") != expected:
                    self.drop()
                    return False
                self.index.take(topic.decode(), payload)
                self.last = expected
                expected += 1

    def drop(self) -> None:
        """Forget everything of the stream."""
        self.resets += 1
        for pod in {holder[0] for holders in self.index.pods.values() for holder in holders}:
            self.index.clear(pod)
        self.last = None

    def read(self, timeout_s: float = 0.05) -> None:
        """Receive one message, if there is one."""
        if not self.sub.poll(int(timeout_s * 1_000)):
            return
        topic, sequence, payload = self.sub.recv_multipart()
        heard = int.from_bytes(sequence, "big")
        if self.last_live is not None and heard < self.last_live:
            self.drop()
            self.request(0)
        self.last_live = heard
        if self.last is None and heard:
            self.request(0)
        if self.last is not None and heard > self.last + 1 and not self.request(self.last + 1):
            return
        if heard == (-1 if self.last is None else self.last) + 1:
            self.index.take(topic.decode(), payload)
            self.last = heard
