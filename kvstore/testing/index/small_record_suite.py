"""Conformance of a ``PrefixIndex`` in its notes and heartbeats: a part of ``suite``."""

from __future__ import annotations

import pytest

from kvstore.core import limits
from kvstore.core.errors import InvalidArgument
from kvstore.core.types import BootId, NodeId
from kvstore.index.contract import Beat, PrefixIndex

BOOT = BootId(b"b" * 16)


class SmallRecordSuite:
    """Behaviour of notes and heartbeats. ``IndexSuite`` has the fixture ``index``."""

    # ---- notes ----
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
