"""Topology, names and abilities, from replies as servers send them."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.core.checksum import key_range
from kvstore.core.types import BlockKey
from kvstore.index.valkey import keys
from kvstore.index.valkey.connection import pack
from kvstore.index.valkey.records import Abilities, abilities_of, change_command, took_effect
from kvstore.index.valkey.topology import NO_SHARD, ShardNodes, known_address, parse_cluster_slots

KEY = BlockKey(bytes(range(16)))
OLD, NEW = b"o" * 16, b"n" * 24


def server(host: bytes | None, port: int) -> list[object]:
    return [host, port, b"0" * 40, []]


def test_redirection_without_host_stays_at_the_host() -> None:
    assert known_address("10.0.0.2:6381", "10.0.0.1") == "10.0.0.2:6381"
    assert known_address(":6381", "10.0.0.1") == "10.0.0.1:6381"
    assert known_address("?:6381", "10.0.0.1") == "10.0.0.1:6381"


def test_slot_of_tag_matches_the_specification() -> None:
    assert keys.slot_of_tag(b"123456789") == 0x31C3 % keys.SLOTS


@given(st.binary(min_size=16, max_size=16))
def test_record_name_has_the_slot_of_its_range(raw: bytes) -> None:
    key = BlockKey(raw)
    name = keys.record_name(key)
    assert name == b"{%03x}" % key_range(key) + raw
    tag = name[1 : name.index(b"}")]
    assert keys.slot_of_tag(tag) == keys.RANGE_SLOTS[key_range(key)]


def test_ranges_spread_over_the_slots() -> None:
    shards = Counter(slot * 16 // keys.SLOTS for slot in keys.RANGE_SLOTS)
    assert min(shards.values()) > 250
    assert keys.SMALL_SLOT not in keys.RANGE_SLOTS


def test_topology_has_shards_in_slot_order() -> None:
    reply = [
        [8_000, 16_383, server(b"b", 2)],
        [0, 99, server(b"a", 1), server(b"c", 3), server(b"d", 4)],
        [200, 7_999, server(b"a", 1), server(b"c", 3), server(b"d", 4)],
    ]
    topology = parse_cluster_slots(reply, "asked")
    assert topology.shards == (ShardNodes("a:1", ("c:3", "d:4")), ShardNodes("b:2"))
    assert [topology.of_slot[slot] for slot in (0, 99, 100, 199, 200, 7_999, 8_000, 16_383)] == [
        0,
        0,
        NO_SHARD,
        NO_SHARD,
        0,
        0,
        1,
        1,
    ]
    assert not topology.complete


@pytest.mark.parametrize("host", [None, b"", b"?"])
def test_server_without_address_is_the_one_asked(host: bytes | None) -> None:
    topology = parse_cluster_slots([[0, 16_383, server(host, 7)]], "asked")
    assert topology.shards == (ShardNodes("asked:7"),)
    assert topology.complete


@pytest.mark.parametrize(
    "reply",
    [
        None,
        b"OK",
        [1],
        [[0, 5]],
        [[0, b"5", server(b"a", 1)]],
        [[5, 4, server(b"a", 1)]],
        [[-1, 4, server(b"a", 1)]],
        [[0, 16_384, server(b"a", 1)]],
        [[0, 5, b"a"]],
        [[0, 5, [b"a"]]],
        [[0, 5, [b"a", b"1"]]],
    ],
)
def test_topology_of_other_shape_is_rejected(reply: object) -> None:
    with pytest.raises(ValueError, match=r"invalid|no list"):
        parse_cluster_slots(reply, "asked")


@pytest.mark.parametrize(
    ("info", "expected"),
    [
        ("redis_version:7.0.15\r\n", Abilities(False, False)),
        ("redis_version:8.4.0\r\n", Abilities(False, False)),
        ("redis_version:7.2.4\r\nserver_name:valkey\r\nvalkey_version:8.0.9\r\n", Abilities(False, False)),
        ("redis_version:7.2.4\r\nvalkey_version:8.1.0\r\n", Abilities(True, False)),
        ("redis_version:7.2.4\r\nvalkey_version:9.1.2\r\n", Abilities(True, True)),
        ("", Abilities(False, False)),
    ],
)
def test_abilities_follow_from_the_version(info: str, expected: Abilities) -> None:
    assert abilities_of(info) == expected
    assert expected.both(Abilities(True, True)) == expected
    assert expected.both(Abilities()) == Abilities()


def test_change_uses_the_best_command() -> None:
    best = Abilities(True, True)
    name = keys.record_name(KEY)
    slot = keys.RANGE_SLOTS[key_range(KEY)]
    assert change_command(KEY, None, NEW, Abilities()) == (slot, pack("SET", name, NEW, "NX"))
    assert change_command(KEY, OLD, NEW, best) == (slot, pack("SET", name, NEW, "IFEQ", OLD))
    assert change_command(KEY, OLD, None, best) == (slot, pack("DELIFEQ", name, OLD))
    for before, after in ((OLD, NEW), (OLD, None)):
        assert b"EVALSHA" in change_command(KEY, before, after, Abilities())[1]


@pytest.mark.parametrize(("reply", "expected"), [(b"OK", True), (1, True), (0, False), (None, False)])
def test_reply_says_whether_a_change_took_effect(reply: object, expected: bool) -> None:
    assert took_effect(reply) is expected
