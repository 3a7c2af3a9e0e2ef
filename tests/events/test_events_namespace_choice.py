"""Tests of the choice of label namespaces, without a store."""

from __future__ import annotations

import pytest

from kvclient import CacheSpec
from kvclient.events.labels import LabelNamespace
from kvstore.config.events import EventsConfig
from kvstore.core.errors import InvalidArgument
from kvstore.events import namespace_choice
from kvstore.events.namespace_choice import NamespaceChoice

SPECS = [CacheSpec(model="m", block_tokens=4, layers=1, layer_block_bytes=64, weights_epoch=str(epoch)) for epoch in range(3)]


def space(epoch: int = 0, engine_hash: str = "sha256") -> LabelNamespace:
    return LabelNamespace.make([SPECS[epoch]], engine_hash=engine_hash)


def choice(**settings: object) -> NamespaceChoice:
    return NamespaceChoice(EventsConfig(zmq="tcp://127.0.0.1:*", model="m", **settings))  # type: ignore[arg-type]


def test_labels_of_another_hash_are_ignored_and_counted() -> None:
    ours, other = space(), space(engine_hash="sha256_cbor")
    assert ours.spec.namespace != other.spec.namespace
    chosen = choice()
    assert chosen.choose([other.spec, ours.spec, *SPECS]) == [ours]
    assert chosen.ignored == 1
    assert choice(engine_hash="sha256_cbor").choose([other.spec, ours.spec, *SPECS]) == [other]


def test_hash_that_was_found_first_stays_chosen() -> None:
    ours, other, late = space(engine_hash="sha256_cbor"), space(engine_hash="sha256"), space(1, "sha256_cbor")
    chosen = choice()
    assert chosen.choose(SPECS) == []
    assert chosen.choose([*SPECS, ours.spec]) == [ours]
    assert chosen.choose([*SPECS, ours.spec, other.spec, late.spec]) == [ours, late]


def test_label_namespaces_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(namespace_choice, "MOST_NAMESPACES", 2)
    spaces = [space(epoch) for epoch in range(3)]
    chosen = choice()
    assert chosen.choose([*SPECS, spaces[2].spec]) == [spaces[2]]
    assert chosen.choose([*SPECS, *(one.spec for one in spaces)]) == [spaces[2], spaces[0]]
    assert chosen.ignored == 1


def test_label_namespace_without_a_hash_is_not_read() -> None:
    for name in ("", "a;kind=x", "SHA", "a" * 65):
        with pytest.raises(InvalidArgument, match="malformed"):
            space(engine_hash=name)
