"""The bytes of KV events as llm-d's router declares them in Go: fields, their order in arrays, and types.

``llmd_wire.json`` has the declarations, and messages packed by hand as the msgpack specification says: maps (vLLM 0.32) and
arrays (earlier versions).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest

from kvstore.events import wire
from support.llmd_rules import REMOVED, STORED, LlmdIndex, as_number, fields_of

WIRE: Final = json.loads(Path(__file__).with_name("llmd_wire.json").read_text(encoding="utf-8"))
MESSAGES: Final = [pytest.param(one, id=one["name"].replace(" ", "-")) for one in WIRE["messages"]]


def is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def is_hash(value: Any) -> bool:
    return bool(value) if isinstance(value, bytes) else is_int(value)


def is_list_of(what: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(map(what, value))


TYPES: Final[dict[str, Callable[[Any], bool]]] = {
    "[]hash": is_list_of(is_hash),
    "hash": is_hash,
    "[]uint32": is_list_of(lambda value: is_int(value) and 0 <= value < 2**32),
    "int": is_int,
    "string": lambda value: isinstance(value, str),
    "[][]any": is_list_of(lambda value: value is None or isinstance(value, list)),
}
"""Types that the converters of the router accept."""


def event_of(message: dict[str, Any]) -> wire.Event:
    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return bytes.fromhex(value["bytes"])
        return [plain(one) for one in value] if isinstance(value, list) else value

    made: wire.Event = getattr(wire, message["tag"])(**{name: plain(value) for name, value in message["fields"].items()})
    return made


@pytest.mark.parametrize("message", MESSAGES)
def test_events_are_encoded_as_the_fixture(message: dict[str, Any]) -> None:
    batch = wire.KVEventBatch(message["ts"], [event_of(message)], message["rank"])
    assert wire.encode(batch).hex() == message["map"]


@pytest.mark.parametrize("message", MESSAGES)
def test_events_have_fields_and_types_of_go(message: dict[str, Any]) -> None:
    ts, [event], rank = msgspec.msgpack.decode(bytes.fromhex(message["map"]))
    assert isinstance(ts, float)
    assert rank is None or is_int(rank)
    declared = dict(WIRE[event.pop("type")])
    assert event.keys() <= declared.keys()
    for name, kind in declared.items():
        kind, _, may_miss = kind.partition("|")
        assert (may_miss and event.get(name) is None) or TYPES[kind](event[name]), name


@pytest.mark.parametrize("message", MESSAGES)
def test_llmd_rules_read_maps_and_arrays_alike(message: dict[str, Any]) -> None:
    [from_map], [from_array] = (msgspec.msgpack.decode(bytes.fromhex(message[form]))[1] for form in ("map", "array"))
    read = {name: value for name, value in fields_of(from_array).items() if value is not None}
    assert read == {name: value for name, value in fields_of(from_map).items() if value is not None}


def test_llmd_rules_have_the_order_of_go() -> None:
    assert list(STORED) == [name for name, _ in WIRE["BlockStored"]]
    assert list(REMOVED) == [name for name, _ in WIRE["BlockRemoved"]]


@pytest.mark.parametrize("form", ["map", "array"])
def test_llmd_rules_index_the_fixture(form: str) -> None:
    index = LlmdIndex(block_size=2)
    chain, child, removed, cleared = (bytes.fromhex(message[form]) for message in WIRE["messages"])
    topic = "kv@pod@model"
    index.take(topic, chain)
    assert index.prefix("model", [1, 2, 3, 70_000]) == {("pod", "cpu"): 4}
    index.take(topic, child)
    assert as_number(bytes(range(32))) in index.blocks_of
    index.take(topic, removed)
    assert index.prefix("model", [1, 2, 3, 70_000]) == {}
    index.take(topic, cleared)
    assert not any(index.pods.values())
