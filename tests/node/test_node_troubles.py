"""What a node says is wrong with it, and for how long it says so."""

from __future__ import annotations

import math
import threading
import time
from types import SimpleNamespace
from typing import cast

import pytest

from kvstore.core.clock import ManualClock
from kvstore.core.limits import MAX_REASON
from kvstore.node.base.volume_guard import VolumeStalled, ignore
from kvstore.node.publish.health import BEHIND_S, QUARANTINE_TOLD_S, Troubles
from kvstore.node.state.change_log import ReplicaChangeLog
from kvstore.node.state.model import NodeVolume
from kvstore.node.table import BlockTable
from kvstore.observe.counters import Counters
from kvstore.observe.failure_tracker import FORGET_S, SETTLE_S, FailureTracker
from kvstore.tiers.contract import DurableVolume


class Node:
    """One with a volume, of which only what is wrong with it is looked at."""

    def __init__(self) -> None:
        self.clock, self.sent_away, self.waiting = ManualClock(), FailureTracker(), 0
        volume = SimpleNamespace(volume_id="n/nvme0", read_only=None)
        self.node_volume = NodeVolume(cast("DurableVolume", volume))
        table = cast("BlockTable", SimpleNamespace(node_volumes=[self.node_volume]))
        log = cast("ReplicaChangeLog", SimpleNamespace(waiting=lambda: self.waiting))
        self.troubles = Troubles(table, log, self.clock, self.sent_away)


def test_all_is_well() -> None:
    node = Node()
    assert node.troubles.told() == []
    assert node.troubles.why_no_blocks(node.node_volume) == ""
    assert node.troubles.publish_failing_s() == 0


def test_bad_blocks_are_told_until_none_has_come_for_long() -> None:
    node = Node()
    node.node_volume.quarantined = 3
    assert node.troubles.told() == ["3 blocks on n/nvme0 proved bad within 10 minutes and are quarantined"]
    node.clock.advance(QUARANTINE_TOLD_S - 1)
    node.node_volume.quarantined = 4
    assert node.troubles.told()[0].startswith("4 blocks")
    node.clock.advance(QUARANTINE_TOLD_S + 1)
    assert node.troubles.told() == []
    node.node_volume.quarantined = 5
    assert node.troubles.told()[0].startswith("1 blocks"), "a lot of its own"


def test_publishing_that_breaks_off_is_told_until_it_has_caught_up() -> None:
    node = Node()
    node.waiting = 70_000
    node.troubles.interrupted("no room on disk for the index")
    node.clock.advance(3.0)
    node.troubles.acknowledged()  # one small batch found room
    (told,) = node.troubles.told()
    assert told == "the index does not take what changes here since 3 s (70000 changes wait): no room on disk for the index"
    assert node.troubles.publish_failing_s() == 3.0
    node.waiting = 0
    node.troubles.caught_up()
    assert node.troubles.told() == []


def test_what_is_not_acknowledged_for_long_is_behind() -> None:
    node = Node()
    node.clock.advance(1000.0)
    assert node.troubles.told() == [], "there was nothing to publish"
    node.troubles.caught_up()
    node.waiting = 1
    node.clock.advance(BEHIND_S)
    assert node.troubles.told() == []
    node.clock.advance(1.0)
    assert "nothing is acknowledged" in node.troubles.told()[0]
    node.troubles.acknowledged()
    assert node.troubles.told() == []


def test_writes_that_fail_are_told_by_the_volume_until_they_work() -> None:
    node = Node()
    node.node_volume.failing.failed(node.clock.now_s(), OSError(28, "No space left on device" * 100))
    assert "No space left on device" in node.troubles.why_no_blocks(node.node_volume)
    assert len(node.troubles.why_no_blocks(node.node_volume)) <= MAX_REASON
    node.clock.advance(SETTLE_S)
    node.node_volume.failing.succeeded(node.clock.now_s())
    assert node.troubles.why_no_blocks(node.node_volume) == ""
    node.sent_away.failed(node.clock.now_s(), "no answer")
    assert node.troubles.told() == ["the storage node does not take its blocks: no answer"]
    node.clock.advance(FORGET_S)
    assert node.troubles.told() == []


def test_troubles_volume_stalled_told_until_it_answers() -> None:
    node, release = Node(), threading.Event()
    node.node_volume.volume.answered_s = -math.inf  # type: ignore[misc]
    node.node_volume.set_guard(Counters(), stall_s=0.05)
    with pytest.raises(VolumeStalled):
        node.node_volume.guard.read(lambda: release.wait(30.0), ignore)
    (told,) = node.troubles.told()
    assert told.startswith("Volume n/nvme0 does not answer I/O since 0 s; its blocks are misses")
    release.set()
    while node.node_volume.guard.left:
        time.sleep(0.001)
    assert node.troubles.told() == []
    assert node.troubles.why_no_blocks(node.node_volume) == ""
