"""Planned loads with parts that do not end."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pytest
from client_fakes import FakeMetadata, FakeNode, found, plan_of

from kvclient import CacheSpec, KVClient, Paths
from kvclient.load import planned
from kvclient.load.sources.storage_path import RemotePath
from support.wait import wait_until


def test_load_waits_for_cancelled_part_and_says_so(
    spec: CacheSpec,
    metadata: FakeMetadata,
    near: FakeNode,
    make_node: Callable[..., FakeNode],
    make_client: Callable[..., KVClient],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The part may still write to the buffer, so the call must not return. A counter and a log line say so."""
    client, far, blocked = make_client(near), make_node("far"), threading.Event()
    metadata.plan_script = lambda request: plan_of(far, request.blocks)
    monkeypatch.setattr(planned, "_END_S", 0.05)
    monkeypatch.setattr(RemotePath, "_fetch", lambda *_: blocked.wait(30))
    data, lookup = np.zeros((4, spec.block_bytes), np.uint8), found(spec, 4, (0, 4, far))
    hits: list[int] = []

    def load() -> None:
        hits.append(client.load(lookup, data, deadline_s=0.2, paths=Paths(decode_node="far")).hit_blocks)

    caller = threading.Thread(target=load)
    caller.start()
    try:
        wait_until(lambda: client.stats().get("client_parts_late_total") == 1)
        assert caller.is_alive()
    finally:
        blocked.set()
        caller.join(10)
    assert hits == [0]
