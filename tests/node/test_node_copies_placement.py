"""Placement of second copies: balance, movement, zones, who acts, and units of chains."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvproto.v1 import common_pb2
from kvproto.v1.metadata_pb2 import NodeStatus
from kvstore.core.types import BlockKey, NodeId
from kvstore.node.copies.membership import Membership
from kvstore.node.copies.placement import UNIT_BLOCKS, Member, Members, unit_of

UNITS = [number.to_bytes(16, "big") for number in range(2_000)]


def member(number: int, zone: str = "", host: str = "", *, takes: bool = True) -> Member:
    return Member(NodeId(f"node-{number}"), zone, host or f"host-{number}", takes)


_members = st.lists(
    st.builds(
        lambda zone, host, takes: ("" if not zone else f"zone-{zone}", f"host-{host}", takes),
        st.integers(0, 3),
        st.integers(0, 4),
        st.booleans(),
    ),
    min_size=1,
    max_size=8,
).map(lambda found: [Member(NodeId(f"node-{at}"), *one[:2], takes=one[2]) for at, one in enumerate(found)])
_units = st.binary(min_size=16, max_size=16)


def seen_by(members: list[Member], here: NodeId) -> Members:
    return Members(here, members)


@given(members=_members, unit=_units)
def test_partners_are_others_that_take_blocks(members: list[Member], unit: bytes) -> None:
    by_id = {one.node_id: one for one in members}
    for here in members:
        found = seen_by(members, here.node_id).partners(unit)
        assert here.node_id not in found
        assert all(by_id[node_id].takes for node_id in found)
        others = [one for one in members if one.takes and one is not here]
        assert bool(found) == bool(others)
        in_other_zones = [one for one in others if here.zone and one.zone and one.zone != here.zone]
        if in_other_zones:
            assert {by_id[node_id].zone for node_id in found}.isdisjoint({here.zone, ""})
        elif any(one.host != here.host for one in others):
            assert all(by_id[node_id].host != here.host for node_id in found)


@given(members=_members, unit=_units, data=st.data())
def test_partner_changes_only_if_the_first_left(members: list[Member], unit: bytes, data: st.DataObject) -> None:
    here = members[0]
    before = seen_by(members, here.node_id)
    gone = data.draw(st.sampled_from(members))
    after = seen_by([one for one in members if one is not gone], here.node_id)
    if gone is not here and before.reach == after.reach and before.partners(unit)[:1] != [gone.node_id]:
        assert after.partners(unit)[:1] == before.partners(unit)[:1]


@given(members=_members, unit=_units, data=st.data())
def test_must_copy_one_node_acts_until_all_are_safe(members: list[Member], unit: bytes, data: st.DataObject) -> None:
    """Let the nodes that must act do so, one round after the other: at most one acts per round, and they come to rest."""
    holders = {data.draw(st.sampled_from(members)).node_id}
    holders |= data.draw(st.sets(st.sampled_from(sorted(one.node_id for one in members)), max_size=3))
    by_id = {one.node_id: one for one in members}
    for _ in range(len(members) + 1):
        acting = [one for one in members if one.node_id in holders and seen_by(members, one.node_id).must_copy(unit, holders)]
        assert len(acting) <= 1
        if not acting:
            break
        partners = seen_by(members, acting[0].node_id).partners(unit)
        assert partners[0] not in holders, "a node that has the block is not asked for a copy"
        holders.add(partners[0])
    else:
        raise AssertionError("copies are made without end")
    for node_id in holders:
        others = [one for one in members if one.takes and one.node_id != node_id]
        if by_id[node_id].takes and others:
            assert len(holders) > 1


@pytest.mark.parametrize("zones", [1, 2, 3])
@pytest.mark.parametrize("nodes", [3, 4, 7, 12])
def test_partners_of_many_units_are_balanced(nodes: int, zones: int) -> None:
    members = [member(number, f"zone-{number % zones}") for number in range(nodes)]
    here = members[0]
    taken = Counter(seen_by(members, here.node_id).partners(unit)[0] for unit in UNITS)
    far = [one for one in members if one is not here and (zones == 1 or one.zone != here.zone)]
    assert taken.keys() == {one.node_id for one in far}
    mean = len(UNITS) / len(far)
    assert 0.7 * mean < min(taken.values()) <= max(taken.values()) < 1.4 * mean


def test_must_copy_draining_holder_lets_another_act() -> None:
    drains = member(1, takes=False)
    members = [member(0), drains, member(2)]
    assert not seen_by(members, NodeId("node-0")).must_copy(UNITS[0], {NodeId("node-0"), drains.node_id})
    without = [one for one in members if one is not drains]
    assert seen_by(without, NodeId("node-0")).must_copy(UNITS[0], {NodeId("node-0"), drains.node_id})


@dataclass
class Part:
    key: BlockKey
    parent: BlockKey | None
    depth: int


def chain(name: str, length: int, parent: Part | None = None) -> list[Part]:
    found: list[Part] = []
    for at in range(length):
        above = found[-1] if found else parent
        depth = 0 if above is None else above.depth + 1
        found.append(Part(BlockKey(f"{name}:{at}".encode()), None if above is None else above.key, depth))
    return found


def units(blocks: list[Part]) -> dict[BlockKey, BlockKey]:
    held = {block.key: block for block in blocks}
    children = Counter(block.parent for block in blocks)
    known: dict[BlockKey, BlockKey] = {}
    return {block.key: unit_of(block, held, lambda key: children[key], known) for block in blocks}


def test_unit_of_long_chain_has_few_units() -> None:
    blocks = chain("long", 4 * UNIT_BLOCKS + 3)
    found = units(blocks)
    assert [found[block.key] for block in blocks] == [blocks[at // UNIT_BLOCKS * UNIT_BLOCKS].key for at in range(len(blocks))]


def test_unit_of_branches_have_own_units() -> None:
    prompt = chain("prompt", 20)
    sessions = [chain(f"session {number}", 30, prompt[-1]) for number in range(5)]
    found = units([*prompt, *(block for session in sessions for block in session)])
    assert {found[block.key] for block in prompt} == {prompt[0].key}
    for session in sessions:
        assert {found[block.key] for block in session} == {session[0].key}


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 50), st.integers(0, 600)), max_size=40))
def test_unit_of_any_links_ends(links: list[tuple[int, int, int]]) -> None:
    """Clients choose parents and depths, so they may form rings."""
    blocks = [Part(BlockKey(bytes([key])), BlockKey(bytes([parent])), depth) for key, parent, depth in links]
    held = {block.key: block for block in blocks}
    found = units(list(held.values()))
    for key, unit in found.items():
        assert unit in held
        assert found[unit] == unit
        assert 0 <= held[key].depth - held[unit].depth < UNIT_BLOCKS


def status(
    number: int, *, alive: bool = True, silent_s: float = 0.0, move: bool | None = None, volume: bool = True
) -> NodeStatus:
    found = NodeStatus(alive=alive, heartbeat_age_ms=round(silent_s * 1000), state=common_pb2.NODE_STATE_ACTIVE)
    found.node.node_id = f"node-{number}"
    found.node.control_address = f"host-{number}:1"
    if volume:
        found.node.volumes.add(volume_id=f"node-{number}/nvme0", tier=common_pb2.TIER_NVME)
    if move is not None:
        found.state = common_pb2.NODE_STATE_DRAINING
        found.order.move = move
    return found


def nodes_of(found: Membership) -> set[str]:
    return {node_id for node_id, _ in found.volumes}


def test_membership_silent_node_counts_for_a_while() -> None:
    found = Membership(NodeId("node-0"), recopy_after_s=60)
    found.update([status(0), status(1)], now_s=100)
    assert found.until_s == float("inf")
    found.update([status(0), status(1, alive=False, silent_s=10)], now_s=200)
    assert nodes_of(found) == {"node-0", "node-1"}
    assert (found.members.reach, found.until_s) == (0, 250)
    found.update([status(0), status(1, alive=False, silent_s=0)], now_s=249)  # of a server that never heard the node
    assert found.until_s == 250
    found.update([status(0), status(1, alive=False, silent_s=0)], now_s=250)
    assert nodes_of(found) == {"node-0"}
    found.update([status(0), status(1)], now_s=260)
    found.update([status(0), status(1, alive=False, silent_s=1)], now_s=300)
    assert nodes_of(found) == {"node-0", "node-1"}, "it has been back meanwhile"


def test_membership_leaving_nodes_do_not_count() -> None:
    found = Membership(NodeId("node-0"), recopy_after_s=60)
    found.update([status(0), status(1, move=True), status(2, move=False), status(3, volume=False), status(4)], now_s=0)
    assert nodes_of(found) == {"node-0", "node-2", "node-4"}
    assert found.members.partners(UNITS[0]) == ["node-4"], "a draining node takes no copies"


def test_members_without_this_node_have_no_partners() -> None:
    members = Members(NodeId("node-9"), [member(0), replace(member(1), takes=False)])
    assert (members.reach, members.partners(UNITS[0])) == (0, [])
    assert not members.must_copy(UNITS[0], set())


@given(members=_members, unit=_units, data=st.data())
def test_probably_shared_names_the_holder_that_is_left(members: list[Member], unit: bytes, data: st.DataObject) -> None:
    holder = data.draw(st.sampled_from(members))
    partners = seen_by(members, holder.node_id).partners(unit)
    if not partners:
        return
    pair = {holder.node_id, partners[0]}
    lost = data.draw(st.sampled_from(sorted(pair)))
    (left,) = pair - {lost}
    silent = seen_by([replace(one, takes=False) if one.node_id == lost and holder.takes else one for one in members], left)
    after = seen_by([one for one in members if one.node_id != lost], left)
    assert after.with_lost(silent, {lost}).probably_shared(unit, {lost}) or not holder.takes


def test_probably_shared_is_rare_in_a_large_cluster() -> None:
    members = [member(number) for number in range(20)]
    lost = {NodeId("node-7")}
    here = seen_by([one for one in members if one.node_id not in lost], NodeId("node-0"))
    before = here.with_lost(seen_by(members, here.here), lost)
    shared = sum(before.probably_shared(unit, lost) for unit in UNITS)
    assert 0 < shared < len(UNITS) * 3 // 20
