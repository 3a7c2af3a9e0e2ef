"""A node that stands still in the middle of loads: that is the reason that is given for them, not what they waited for before."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
import urllib.request
from collections.abc import Callable

import pytest

from conftest import Store
from kvstore.embedded.cluster import NodeSpec

BLOCKS = 64
STOP_S = 0.6


@pytest.mark.timeout(120)
def test_a_node_that_stood_still_is_the_reason(make_store: Callable[..., Store]) -> None:
    store = make_store(NodeSpec("a", dram_bytes=8 << 20, nvme_bytes=64 << 20))  # loads are larger than DRAM: they take their time
    engine, node = store.engine("a", layer_bytes=64 << 10), store.cluster.node("a")
    for end in range(16, BLOCKS + 1, 16):
        assert engine.store("chain", end, durable=True).durable
    over = threading.Event()

    def load() -> None:
        while not over.is_set():
            engine.load("chain", BLOCKS, deadline_s=10.0)

    def reasons() -> list[str]:
        with urllib.request.urlopen(f"http://{node.metrics_address}/loads", timeout=30) as answer:
            found = json.loads(answer.read())
        return [one["reason"] for one in found["slowest"] if one["seconds"] > STOP_S / 2]

    loading = threading.Thread(target=load)
    loading.start()
    try:
        for _ in range(40):  # most stops fall between two loads, as the node sees them
            os.kill(node.process.pid, signal.SIGSTOP)
            time.sleep(STOP_S)
            os.kill(node.process.pid, signal.SIGCONT)
            if slow := reasons():
                break
        else:
            pytest.fail("no load was under way in any of the stops")
    finally:
        over.set()
        loading.join()
    assert all("for this node to run: its process or its host stood still" in reason for reason in slow), slow
