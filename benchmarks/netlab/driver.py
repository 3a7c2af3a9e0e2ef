"""An engine's side of the lab: a client on one host, told what to load by JSON lines on standard input.

Commands: ``store`` (every chain of the workload, durably), ``loads`` (some loads, a number of them in flight, each with its
bytes checked after its time was taken), ``quit``. Every command is answered by one JSON line. Times are of the monotonic clock,
which all hosts of a lab share.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvclient import CacheSpec, ClientOptions, KVClient, Paths
from kvstore.core.types import Outcome
from kvstore.workload.payload import Payloads
from netlab.workload import Load, Workload, stores

STORE_S = 20.0
STORE_BLOCKS = 256
THINK_S = 0.3
"""Between two loads of a session: time for its blocks to leave the nodes that they only passed through."""

Bytes = npt.NDArray[np.uint8]


class Engine:
    """Runs commands with one client."""

    def __init__(self, client: KVClient, workload: Workload) -> None:
        self.client = client
        self.workload = workload
        self._payloads = Payloads(client.spec.block_bytes)
        self._buffers: list[Bytes] = []

    def store(self) -> dict[str, Any]:
        """Stores the workload; returns once all of it is durable and found."""
        client, keys = self.client, self.workload.keys
        data = np.zeros((STORE_BLOCKS, client.spec.block_bytes), np.uint8)
        stored = 0
        for numbers, first in stores(self.workload):
            chain = [keys[number] for number in numbers.tolist()]
            before = self._parent(numbers, first)
            for at in range(0, len(chain), STORE_BLOCKS):
                part = chain[at : at + STORE_BLOCKS]
                self._payloads.fill(part, data[: len(part)])
                parent = chain[at - 1] if at else before
                result = client.store(part, data[: len(part)], parent=parent, depth=first + at, durable=True, deadline_s=STORE_S)
                if result.held_blocks != len(part):
                    raise SystemExit(f"only {result.held_blocks} of {len(part)} blocks were stored: {result.error}")
                stored += len(part)
        return {"stored": stored}

    def _parent(self, numbers: npt.NDArray[np.int64], first: int) -> Any:  # noqa: ANN401  # a key, or None at the head
        if not first:
            return None
        chain = next(chain for chain in self.workload.chains if len(chain) > first and chain[first] == numbers[0])
        return self.workload.keys[int(chain[first - 1])]

    def loads(self, command: dict[str, Any]) -> dict[str, Any]:
        """Loads, in order, at most one of a session at a time."""
        todo = _Queue(command["loads"], self.workload.loads)
        paths = Paths(**command["paths"])
        done: list[dict[str, Any]] = []
        began_s = time.monotonic()
        self._grow(command["in_flight"], max(len(self.workload.loads[number].chain) for number in command["loads"]))

        def work(buffer: Bytes) -> None:
            while (number := todo.take()) is not None:
                answer = self._load(number, buffer, paths, command["deadline_s"])
                todo.give_back(number)
                done.append(answer)

        threads = [threading.Thread(target=work, args=(buffer,)) for buffer in self._buffers[: command["in_flight"]]]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return {"began_s": began_s, "loads": done, "counters": self.client.stats()}

    def _grow(self, count: int, blocks: int) -> None:
        """Buffers are made once: their first touch is no part of a load."""
        if len(self._buffers) < count or len(self._buffers[0]) < blocks:
            self._buffers = [np.ones((blocks, self.client.spec.block_bytes), np.uint8) for _ in range(count)]

    def _load(self, number: int, buffer: Bytes, paths: Paths, deadline_s: float) -> dict[str, Any]:
        keys = [self.workload.keys[at] for at in self.workload.loads[number].chain.tolist()]
        space = buffer[: len(keys)]
        start_s = time.monotonic()
        found = self.client.lookup(keys)
        if found.hit_blocks != len(keys):
            return {"load": number, "start_s": start_s, "end_s": time.monotonic(), "bytes": 0, "wrong": 0, "missed": len(keys)}
        layer0_s = None
        if paths.layer_group:
            with self.client.start_load(found, space, deadline_s=deadline_s, paths=paths) as handle:
                handle.wait_layer(0)
                layer0_s = time.monotonic() - start_s
                result = handle.result()
        else:
            result = self.client.load(found, space, deadline_s=deadline_s, paths=paths)
        end_s = time.monotonic()
        hits = np.flatnonzero(result.outcomes == Outcome.HIT)
        wrong = self._payloads.wrong_blocks([keys[at] for at in hits.tolist()], space if len(hits) == len(keys) else space[hits])
        space[:, :64] = 0xA5  # what the next load does not bring must not look right
        return {
            "load": number,
            "start_s": start_s,
            "end_s": end_s,
            "bytes": len(hits) * self.client.spec.block_bytes,
            "wrong": len(wrong),
            "missed": len(keys) - len(hits),
            "layer0_s": layer0_s,
            "paths": dict(result.bytes_by_path),
            "error": None if result.error is None else str(result.error),
        }


class _Queue:
    """Loads to do: the first whose session has none under way."""

    def __init__(self, numbers: Sequence[int], loads: Sequence[Load]) -> None:
        self._session = {number: loads[number].session for number in numbers}
        self._left = deque(numbers)
        self._free_s: dict[int, float] = {}
        """When each session may go on; infinite while a load of it is under way."""
        self._changed = threading.Condition()

    def take(self) -> int | None:
        """The next one; waits while no session of those that are left may go on. None: none is left."""
        with self._changed:
            while self._left:
                now_s, next_s = time.monotonic(), math.inf
                for number in self._left:
                    free_s = self._free_s.get(self._session[number], now_s)
                    if free_s <= now_s:
                        self._left.remove(number)
                        self._free_s[self._session[number]] = math.inf
                        return number
                    next_s = min(next_s, free_s)
                self._changed.wait(min(next_s - now_s, 1.0))
            return None

    def give_back(self, number: int) -> None:
        """It is done."""
        with self._changed:
            self._free_s[self._session[number]] = time.monotonic() + THINK_S
            self._changed.notify_all()


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--metadata", required=True)
    parser.add_argument("--node", required=True)
    parser.add_argument("--workload", type=Path, required=True)
    parser.add_argument("--layers", type=int, required=True)
    parser.add_argument("--layer-block-bytes", type=int, required=True)
    parser.add_argument("--block-tokens", type=int, required=True)
    parsed = parser.parse_args()
    spec = CacheSpec(
        model="netlab", block_tokens=parsed.block_tokens, layers=parsed.layers, layer_block_bytes=parsed.layer_block_bytes
    )
    options = ClientOptions(client_name=f"driver-{os.getpid()}", workers=16)
    with KVClient.connect(parsed.metadata, spec, node=parsed.node, options=options) as client:
        engine = Engine(client, Workload.read(parsed.workload))
        print(json.dumps({"ready": True}), flush=True)
        for line in sys.stdin:
            command = json.loads(line)
            if command["do"] == "quit":
                return
            answer = engine.store() if command["do"] == "store" else engine.loads(command)
            print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
