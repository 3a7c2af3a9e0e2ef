"""The part of the conformance suite about namespaces, notes and heartbeats: small records that the metadata server keeps."""

from __future__ import annotations

import os

import pytest

from kvstore.core import limits
from kvstore.core.errors import InvalidArgument
from kvstore.core.types import BootId, NamespaceId, NodeId, Tier, VolumeId
from kvstore.index.contract import Beat, PrefixHit, PrefixIndex, VolumeEpoch
from kvstore.testing.index.model import Chain

NAMESPACE = NamespaceId(b"n" * 16)
CHAIN = Chain.of(NAMESPACE, range(100))
BOOT = BootId(b"b" * 16)


def begin(index: PrefixIndex, volume: str = "v") -> VolumeEpoch:
    """A new volume epoch."""
    return index.open_volume_epoch(VolumeId(volume), NodeId("node"), Tier.DRAM, BootId(os.urandom(16)))


def ask(index: PrefixIndex, chain: Chain, visible: set[VolumeEpoch]) -> PrefixHit:
    """Look up a chain."""
    return index.lookup(chain.namespace, chain.packed, visible)


class SmallRecordsSuite:
    """Behaviour of every index. ``IndexSuite`` has the fixtures."""

    # ---- namespaces, notes, revision ----
    def test_namespaces_are_listed_in_order_of_arrival(self, index: PrefixIndex) -> None:
        names = [NamespaceId(bytes([number]) * 16) for number in (7, 3, 9)]
        for name in names:
            index.put_namespace(name, b"spec of " + name)
        revision = index.revision
        index.put_namespace(names[0], b"spec of " + names[0])
        assert index.revision == revision
        assert index.namespaces() == [(name, b"spec of " + name) for name in names]
        assert index.spec_of(names[1]) == b"spec of " + names[1]
        assert index.spec_of(NamespaceId(b"none" * 4)) is None

    def test_batch_before_its_namespace_is_accepted(self, index: PrefixIndex) -> None:
        volume_epoch = begin(index)
        index.publish(volume_epoch, [CHAIN.run(0, 10)], [])
        assert index.namespaces() == []
        assert index.spec_of(NAMESPACE) is None
        assert ask(index, CHAIN, {volume_epoch}).blocks == 10
        index.put_namespace(NAMESPACE, b"")
        assert index.namespaces() == [(NAMESPACE, b"")]
        assert index.spec_of(NAMESPACE) == b""
        assert ask(index, CHAIN, {volume_epoch}).blocks == 10

    def test_notes_are_stored_and_removed(self, index: PrefixIndex) -> None:
        long = "node/" + "ü" * 600
        index.put_note("a", b"1")
        index.put_note(long, b"")
        index.put_note("a", b"2")
        assert index.notes("") == {"a": b"2", long: b""}
        assert index.note("a") == b"2"
        assert index.note(long) == b""
        index.put_note("a", None)
        index.put_note("absent", None)
        assert index.note("a") is None
        assert index.notes("") == {long: b""}

    def test_notes_are_selected_by_prefix(self, index: PrefixIndex) -> None:
        # longer than a key of most stores, equal for hundreds of bytes, and multi-byte characters at any cut
        longs = ["n/" + "ü" * 600 + end for end in ("", "a", "ab")] + ["n/" + "x" * 476 + "ü" * 40]
        notes = {name: name.encode()[-8:] for name in ["n", "n/", "n/a", "n/ab", "n/b", "m/a", "o", "n0", *longs]}
        index.put_notes(notes)
        prefixes = ["", "n", "n/", "n/a", "n/ü", "n/" + "x" * 476, *longs, "n/" + "ü" * 599, "z", "n/a\0", "\U0010ffff"]
        for prefix in prefixes:
            assert index.notes(prefix) == {name: value for name, value in notes.items() if name.startswith(prefix)}

    def test_notes_of_one_batch_are_stored_and_removed(self, index: PrefixIndex) -> None:
        index.put_notes({"a": b"1", "b": b"2", "absent": None})
        revision = index.revision
        index.put_notes({"a": b"1", "b": None, "c": b"3"}, announce=False)
        assert index.revision == revision
        assert index.notes("") == {"a": b"1", "c": b"3"}
        index.put_notes({"a": b"1", "b": None})
        index.put_notes({})
        assert index.revision == revision
        index.put_notes({"a": b"1", "c": None})
        assert index.revision > revision

    @pytest.mark.parametrize(
        "notes",
        [
            {"": b"v"},
            {"n" * (limits.MAX_NOTE_NAME_BYTES + 1): b"v"},
            {"good": b"v", "n": bytes(limits.MAX_NOTE_BYTES + 1)},
            {f"n{number}": b"" for number in range(limits.MAX_NODES + 1)},
        ],
        ids=["no name", "long name", "long value", "many"],
    )
    def test_notes_beyond_limits_are_refused(self, index: PrefixIndex, notes: dict[str, bytes | None]) -> None:
        with pytest.raises(InvalidArgument):
            index.put_notes(notes)
        assert index.notes("") == {}
        index.put_note("n" * limits.MAX_NOTE_NAME_BYTES, bytes(limits.MAX_NOTE_BYTES))

    # ---- heartbeats ----
    def test_beats_are_stored_and_removed(self, index: PrefixIndex) -> None:
        assert index.beats() == {}
        one, long = NodeId("one"), NodeId("ü" * (limits.MAX_NAME_BYTES // 2))
        revision = index.revision
        beats = {one: Beat(BOOT, 1, 0), long: Beat(BOOT, 2**64 - 1, 2**64 - 1)}
        index.put_beats(beats)
        assert index.beats() == beats
        index.put_beats({one: Beat(BootId(b"c" * 16), 0, 0), long: None, NodeId("absent"): None})
        assert index.beats() == {one: Beat(BootId(b"c" * 16), 0, 0)}
        index.put_beats({})
        assert index.revision == revision, "heartbeats change no view"
        assert index.notes("") == {}

    def test_beats_of_as_many_nodes_as_allowed_fit(self, index: PrefixIndex) -> None:
        beats = {NodeId(f"node-{number}"): Beat(BOOT, number, number) for number in range(limits.MAX_NODES)}
        index.put_beats(beats)
        assert index.beats() == beats

    @pytest.mark.parametrize(
        "beats",
        [
            {"": Beat(BOOT, 1, 1)},
            {"n" * (limits.MAX_NAME_BYTES + 1): Beat(BOOT, 1, 1)},
            {"good": Beat(BOOT, 1, 1), "n": Beat(BootId(b"short"), 1, 1)},
            {"n": Beat(BOOT, 2**64, 1)},
            {"n": Beat(BOOT, 1, -1)},
            {f"n{number}": Beat(BOOT, 1, 1) for number in range(limits.MAX_NODES + 1)},
        ],
        ids=["no node", "long node", "short boot", "large counter", "negative report", "many"],
    )
    def test_beats_beyond_limits_are_refused(self, index: PrefixIndex, beats: dict[NodeId, Beat | None]) -> None:
        with pytest.raises(InvalidArgument):
            index.put_beats(beats)
        assert index.beats() == {}

    def test_revision_changes_only_with_announced_changes(self, index: PrefixIndex) -> None:
        seen = [index.revision]

        def moved() -> bool:
            seen.append(index.revision)
            assert seen[-1] >= seen[-2]
            return seen[-1] > seen[-2]

        volume_epoch = begin(index)
        assert moved()
        index.publish(volume_epoch, [CHAIN.run(0, 10)], [])
        assert not moved()
        index.put_note("a", b"1")
        assert moved()
        index.put_note("a", b"1")
        assert not moved()
        index.put_note("a", b"2", announce=False)
        assert not moved()
        assert index.note("a") == b"2"
        index.put_namespace(NAMESPACE, b"spec")
        assert moved()
        index.close_volume_epoch(volume_epoch)
        assert moved()
        index.close_volume_epoch(volume_epoch)
        assert not moved()
