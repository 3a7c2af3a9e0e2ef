"""Second copies that a node makes: offers, rate, refusals and losses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from kvproto.v1 import common_pb2, metadata_pb2, node_pb2
from kvstore.core.errors import Unavailable
from kvstore.core.types import BlockKey, NamespaceId, NodeId, StoreOutcome
from kvstore.node.copies import copier as copier_module
from kvstore.node.copies.copier import CHECKS_PER_S, HOT_CHECK_S, LATE_S, REBUILD_S, RETRY_S, SETTLE_S, Copier
from kvstore.node.state.model import Block
from kvstore.observe.metric_definitions import node as node_metrics
from support.quota_node import BLOCK, QuotaNode

HERE = "node-0"
RECOPY_S = 60.0
BYTES_PER_S = 100 * BLOCK
STORED, EXISTS, SKIPPED, LOST = StoreOutcome.STORED, StoreOutcome.EXISTS, StoreOutcome.SKIPPED, StoreOutcome.LOST


def status(node_id: str, zone: str = "") -> metadata_pb2.NodeStatus:
    found = metadata_pb2.NodeStatus(alive=True, state=common_pb2.NODE_STATE_ACTIVE)
    found.node.node_id, found.node.control_address, found.node.zone = node_id, f"{node_id}:1", zone
    found.node.volumes.add(volume_id=f"{node_id}/nvme0", tier=common_pb2.TIER_NVME)
    return found


class OtherSide:
    """The metadata server and the other nodes, in place of a ``PullClient``."""

    def __init__(self) -> None:
        self.node = common_pb2.NodeInfo(node_id=HERE)
        self.statuses = [status(HERE), status("node-1")]
        self.held: dict[BlockKey, set[str]] = {}
        self.pulled: list[tuple[str, list[BlockKey], bool]] = []
        self.outcome: Callable[[BlockKey], StoreOutcome] = lambda _key: STORED
        self.calls: Counter[str] = Counter()
        self.away = False
        self.published = True

    def _called(self, name: str) -> None:
        self.calls[name] += 1
        if self.away:
            raise Unavailable("it does not answer")

    def nodes(self) -> Sequence[metadata_pb2.NodeStatus]:
        self._called("nodes")
        return self.statuses

    def holders(
        self, blocks: Mapping[NamespaceId, Sequence[BlockKey]], counts: Callable[[object], bool]
    ) -> Iterator[tuple[BlockKey, str]]:
        self._called("holders")
        assert counts(metadata_pb2.LocatedVolume())
        here = {HERE} if self.published else set()
        return iter([(key, one) for keys in blocks.values() for key in keys for one in self.held.get(key, set()) | here])

    def pull(
        self, control_address: str, blocks: Sequence[Block], spec: object, *, second_copy: bool, may_evict: bool
    ) -> node_pb2.PullBlocksResponse:
        self._called("pull")
        assert (spec, second_copy) == (None, True)
        node_id = control_address.removesuffix(":1")
        self.pulled.append((node_id, [block.key for block in blocks], may_evict))
        outcomes = [self.outcome(block.key) for block in blocks]
        for block, outcome in zip(blocks, outcomes, strict=True):
            if outcome in (STORED, EXISTS):
                self.held.setdefault(block.key, set()).add(node_id)
        return node_pb2.PullBlocksResponse(outcomes=bytes(outcomes), why="" if set(outcomes) <= {STORED, EXISTS} else "refused")

    def close(self) -> None:
        pass


class CopyingNode(QuotaNode):
    """A node whose first namespace may get two copies."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.others = OtherSide()
        self.paused_s: list[float] = []
        self.copier = Copier(
            self.others,  # type: ignore[arg-type]
            self.table,
            self.gate,
            self.counters,
            self.clock,
            window_bytes=8 * BLOCK,
            bytes_per_s=BYTES_PER_S,
            recopy_after_s=RECOPY_S,
            pause=self._pause,
        )

    def _pause(self, seconds: float) -> bool:
        self.paused_s.append(seconds)
        self.clock.advance(seconds)
        return False

    def order(self, copies: int) -> None:
        retention = metadata_pb2.Retention()
        retention.rules.add(namespace_id=self.namespace.namespace_id, copies=copies)
        self.enforcer.apply(retention)
        self.enforcer.round()

    def work(self, after_s: float = SETTLE_S) -> None:
        """Let some time pass, then do rounds until there is nothing to do."""
        self.clock.advance(after_s)
        for _ in range(1_000):
            if not self.copier.round():
                return
        raise AssertionError("the rounds do not end")

    def members_changed(self) -> None:
        self.copier.on_heartbeat(metadata_pb2.HeartbeatResponse(membership_version=self.others.calls["nodes"] + 1))

    def pulled(self) -> list[BlockKey]:
        return [key for _, keys, _ in self.others.pulled for key in keys]


@pytest.fixture
def node(tmp_path: Path) -> Iterator[CopyingNode]:
    made = CopyingNode(tmp_path)
    yield made
    made.close()


def test_copier_without_rule_calls_nobody(node: CopyingNode) -> None:
    node.store_durably("chain", 8)
    node.work()
    assert not node.others.calls
    assert node.copier.waiting_blocks == 0


def test_copier_copies_old_and_new_blocks_once(node: CopyingNode) -> None:
    old = node.store_durably("old", 8)
    node.order(2)
    node.work()
    assert node.pulled() == old
    new = node.store_durably("new", 20)
    node.work(0.0)
    assert node.pulled() == old, "other nodes may not have published their replicas"
    node.work()
    assert node.pulled() == [*old, *new]
    assert [len(keys) for _, keys, _ in node.others.pulled] == [8, 8, 8, 4], "offers have the size of the window"
    assert node.counters.get(node_metrics.COPIES_MADE_BLOCKS) == 28
    assert node.counters.get(node_metrics.COPIES_MADE_BYTES) == 28 * BLOCK
    node.others.calls.clear()
    for _ in range(10):
        node.work(HOT_CHECK_S / 20)
    assert not node.others.calls, "at rest, nothing is asked"


def test_copier_pauses_for_each_copied_byte(node: CopyingNode) -> None:
    node.order(2)
    held_elsewhere = node.store_durably("there", 16)
    node.others.held = {key: {"node-1"} for key in held_elsewhere}
    node.store_durably("here", 30)
    node.work()
    checks_s = node.counters.get(node_metrics.COPIES_CHECKED_BLOCKS) / CHECKS_PER_S
    assert node.counters.get(node_metrics.COPIES_MADE_BYTES) == 30 * BLOCK
    assert sum(node.paused_s) == pytest.approx(checks_s + 30 * BLOCK / BYTES_PER_S)


def test_copier_other_namespaces_have_one_copy(node: CopyingNode) -> None:
    node.order(2)
    node.store_durably("other", 8, namespace=1)
    node.work()
    assert node.pulled() == []
    node.order(1)
    node.store_durably("chain", 8)
    node.work()
    assert node.pulled() == []


def test_copier_evicted_block_is_not_offered(node: CopyingNode) -> None:
    node.order(2)
    keys = node.store_durably("chain", 8)
    node.set_rules()
    node.order(2)
    block = node.block(keys[-1])
    with node.table.residency.lock:
        node.table.residency.mark_evicting([block])
    node.work()
    assert node.pulled() == keys[:-1]
    with node.table.residency.lock:
        node.table.residency.cancel_eviction([block])


def test_copier_lost_partner_is_replaced_after_a_while(node: CopyingNode) -> None:
    node.order(2)
    keys = node.store_durably("chain", 8)
    node.work()
    node.others.statuses = [status(HERE), status("node-1"), status("node-2")]
    node.members_changed()
    node.work()
    assert node.pulled() == keys, "a node that comes changes nothing"
    node.others.statuses[1].alive = False
    node.members_changed()
    node.work()
    node.work(RECOPY_S / 2)
    assert node.pulled() == keys, "most nodes come back"
    node.work(RECOPY_S)
    assert node.pulled() == keys * 2
    assert node.others.pulled[-1][0] == "node-2"


def test_copier_shared_blocks_are_checked_first(node: CopyingNode) -> None:
    node.others.statuses += [status(f"node-{number}") for number in range(2, 8)]
    node.order(2)
    chains = [node.store_durably(number, 1) for number in range(60)]
    node.work()
    node.work()
    assert node.copier.waiting_blocks == 0
    lost = {key for key, found in node.others.held.items() if found == {"node-1"}}
    assert 0 < len(lost) < len(chains)
    for key in lost:
        del node.others.held[key]
    asked = []
    holders = node.others.holders

    def noting(
        blocks: Mapping[NamespaceId, Sequence[BlockKey]], counts: Callable[[object], bool]
    ) -> Iterator[tuple[BlockKey, str]]:
        asked.append({key for keys in blocks.values() for key in keys})
        return holders(blocks, counts)

    node.others.holders = noting  # type: ignore[method-assign]
    del node.others.statuses[1]
    node.members_changed()
    node.work()
    assert lost <= asked[0] < {key for keys in chains for key in keys}
    assert set().union(*asked[1:]) | asked[0] == {key for keys in chains for key in keys}, "then all others"
    assert all(node.others.held[key] for key in lost)


def test_copier_removed_partner_is_replaced_at_once(node: CopyingNode) -> None:
    node.order(2)
    keys = node.store_durably("chain", 8)
    node.work()
    node.others.statuses = [status(HERE), status("node-2")]
    node.members_changed()
    node.work(0.0)
    assert node.pulled() == keys * 2


def test_copier_recreated_volume_gets_copies_again(node: CopyingNode) -> None:
    node.order(2)
    keys = node.store_durably("chain", 8)
    node.work()
    node.others.held.clear()
    node.others.statuses[1].node.volumes[0].uid = b"another creation"
    node.members_changed()
    node.work()
    assert node.pulled() == keys * 2


def test_copier_zones_that_appear_get_copies(node: CopyingNode) -> None:
    node.order(2)
    keys = [key for number in range(12) for key in node.store_durably(number, 2)]
    node.others.statuses = [status(HERE, "east"), status("node-1", "east")]
    node.work()
    assert Counter(node.pulled()) == Counter(keys)
    node.others.pulled.clear()
    node.others.statuses.append(status("node-2", "west"))
    node.members_changed()
    node.work()
    assert {node_id for node_id, _, _ in node.others.pulled} == {"node-2"}
    assert 0 < len(node.pulled()) < len(keys), "of two nodes in one zone, one acts for each chain"
    node.others.calls.clear()
    for alive in (False, True):
        node.others.statuses[2].alive = alive
        node.members_changed()
        node.work()
    assert node.others.calls["holders"] == 0, "a zone that comes back starts no pass"


def test_copier_zone_that_was_away_gets_new_blocks(node: CopyingNode) -> None:
    """Blocks stored while the other zone was away have both copies in one zone, until it is back."""
    node.others.statuses = [status(HERE, "east"), status("node-1", "east"), status("node-2", "west")]
    node.order(2)
    node.work()
    node.others.statuses[2].alive = False
    node.members_changed()
    keys = [key for number in range(12) for key in node.store_durably(number, 1)]
    node.work()
    node.work()
    assert [node.others.held[key] for key in keys] == [{"node-1"}] * 12
    node.others.statuses[2].alive = True
    node.members_changed()
    node.others.pulled.clear()
    node.work()
    assert {node_id for node_id, _, _ in node.others.pulled} == {"node-2"}
    assert 0 < len(node.pulled()) < 12, "of two nodes in one zone, one acts for each chain"


def test_copier_renamed_zones_are_checked_again(node: CopyingNode) -> None:
    node.others.statuses = [status(HERE, "east"), status("node-1", "west"), status("node-2", "west")]
    node.order(2)
    keys = [key for number in range(12) for key in node.store_durably(number, 1)]
    node.work()
    node.work()
    near = [key for key in keys if node.others.held[key] == {"node-1"}]
    assert 0 < len(near) < 12
    node.others.statuses[1].node.zone = "east"
    node.members_changed()
    node.others.pulled.clear()
    node.work()
    assert {node_id for node_id, _, _ in node.others.pulled} == {"node-2"}
    assert set(node.pulled()) < set(near)
    assert node.pulled()
    node.others.calls.clear()
    for status_ in node.others.statuses:
        status_.node.control_address = f"elsewhere-{status_.node.node_id}:1"
    node.members_changed()
    node.work()
    assert node.others.calls["holders"] == 0, "another address is no other zone"


def test_copier_short_answer_leaves_blocks_queued(node: CopyingNode) -> None:
    keys = node.store_durably("chain", 8)
    node.order(2)
    pull = node.others.pull

    def short(*arguments: object, **options: object) -> node_pb2.PullBlocksResponse:
        answer = pull(*arguments, **options)  # type: ignore[arg-type]
        for key in keys[3:]:
            del node.others.held[key]
        return node_pb2.PullBlocksResponse(outcomes=answer.outcomes[:3])

    node.others.pull = short  # type: ignore[method-assign]
    node.work()
    assert node.copier.waiting_blocks == 5
    node.others.pull = pull  # type: ignore[method-assign]
    node.work(RETRY_S)
    assert node.pulled() == [*keys, *keys[3:]]


def test_copier_full_partner_is_tried_again_later(node: CopyingNode) -> None:
    node.others.outcome = lambda _key: SKIPPED
    node.order(2)
    node.store_durably("chain", 16)
    node.work()
    assert len(node.others.pulled) == 1, "the second offer is not made after the first was refused"
    assert node.counters.get(node_metrics.COPIES_REFUSED_BLOCKS) == 8
    for _ in range(20):
        node.work(1.0)
    refused = len(node.others.pulled)
    assert refused < 6, "a partner that refuses rests"
    node.others.outcome = lambda _key: STORED
    for _ in range(10):
        node.work(60.0)
    assert node.counters.get(node_metrics.COPIES_MADE_BLOCKS) == 16
    assert node.copier.waiting_blocks == 0


def test_copier_other_partner_takes_refused_blocks(node: CopyingNode) -> None:
    node.others.statuses += [status("node-2"), status("node-3")]
    refusing: list[str] = []
    node.others.outcome = lambda _key: SKIPPED if node.others.pulled[-1][0] == refusing[0] else STORED
    node.order(2)
    keys = node.store_durably("chain", 8)
    refusing.append(node_first(node, keys[0]))
    node.work()
    node.work(RETRY_S)
    assert [len(found) for _, found, _ in node.others.pulled] == [8, 8]
    assert {len(node.others.held[key]) for key in keys} == {1}


def node_first(node: CopyingNode, head: BlockKey) -> str:
    members = copier_module.Membership(NodeId(HERE), RECOPY_S)
    members.update(node.others.statuses, 0.0)
    return members.members.partners(head)[0]


def test_copier_cold_blocks_may_not_evict(node: CopyingNode) -> None:
    hot, cold = node.store_durably("hot", 4), node.store_durably("cold", 4)
    node.table.drop_staged([node.block(key) for key in cold])
    node.order(2)
    node.work()
    assert node.others.pulled == [("node-1", hot, True), ("node-1", cold, False)]


def test_copier_server_away_blocks_stay_queued(node: CopyingNode) -> None:
    node.order(2)
    node.work()
    node.others.away = True
    keys = node.store_durably("chain", 8)
    node.work(0.0)
    for _ in range(3):
        with pytest.raises(Unavailable):
            node.work(RETRY_S)
    node.others.away = False
    node.work(RETRY_S)
    assert node.pulled() == keys


def test_copier_unpublished_blocks_wait(node: CopyingNode) -> None:
    """An index that does not know the holder's own replica may lack those of others too."""
    node.order(2)
    node.others.published = False
    keys = node.store_durably("chain", 8)
    for _ in range(3):
        node.work(RETRY_S)
    assert node.pulled() == []
    node.others.published = True
    node.work(RETRY_S)
    assert node.pulled() == keys


def test_copier_new_index_is_filled_first(node: CopyingNode) -> None:
    node.order(2)
    keys = node.store_durably("chain", 8)
    node.copier.on_registered(metadata_pb2.RegisterNodeResponse(), new_index=True)
    node.work(REBUILD_S / 2)
    assert node.pulled() == []
    node.work(REBUILD_S)
    node.work()
    assert node.pulled() == keys


def test_copier_draining_node_copies_nothing(node: CopyingNode) -> None:
    node.order(2)
    node.store_durably("chain", 8)
    node.gate.set_draining(True)
    node.work()
    assert not node.others.calls
    node.gate.set_draining(False)
    node.work()
    assert len(node.pulled()) == 8


def test_copier_left_out_blocks_are_found_by_a_pass(node: CopyingNode, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copier_module, "MAX_NEW", 3)
    node.order(2)
    node.work()
    keys = node.store_durably("chain", 8)
    node.work(copier_module.LEFT_OUT_S)
    node.work()
    assert sorted(node.pulled()) == sorted(keys)


def test_copier_evicted_copy_of_used_block_is_made_again(node: CopyingNode) -> None:
    node.order(2)
    keys = node.store_durably("chain", 8)
    node.work()
    node.others.held.clear()
    node.work(HOT_CHECK_S)
    assert node.pulled() == keys * 2


def test_copier_reports_late_copies(node: CopyingNode) -> None:
    node.order(2)
    node.others.outcome = lambda _key: SKIPPED
    node.store_durably("chain", 8)
    node.work()
    assert node.copier.late() == ""
    for _ in range(3):
        node.work(LATE_S / 2)
    assert "8 durable blocks wait for a second copy" in node.copier.late()
    assert "node-1: refused" in node.copier.late()
    node.others.outcome = lambda _key: STORED
    node.work(LATE_S)
    assert node.copier.late() == ""


def test_copier_alone_reports_late_copies(node: CopyingNode) -> None:
    node.others.statuses = [status(HERE)]
    node.order(2)
    node.store_durably("chain", 8)
    node.work()
    assert node.copier.late() == ""
    node.work(LATE_S + 1)
    assert "no other node" in node.copier.late()
    node.others.statuses.append(status("node-1"))
    node.members_changed()
    node.work()
    assert (node.copier.late(), len(node.pulled())) == ("", 8)
