"""Tests of the table of shares that servers exchange, and of the settings of servers that share an index."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.config.metadata import MetadataConfig
from kvstore.core.errors import InvalidArgument, Unavailable
from kvstore.core.limits import MAX_NOTE_BYTES, MAX_QUOTAS
from kvstore.core.types import NodeId
from kvstore.metadata.retention.share_table import SHARES_NOTE, ShareTable
from kvstore.rpc.address import reachable_address

names_ = st.text(min_size=1, max_size=10)


@st.composite
def tables(draw: st.DrawFn) -> ShareTable:
    nodes = draw(st.lists(names_, unique=True, max_size=5))
    shares = st.none() | st.lists(st.integers(0, 2**62), min_size=len(nodes), max_size=len(nodes))
    return ShareTable(
        reports=draw(st.dictionaries(names_.map(NodeId), st.tuples(st.binary(max_size=16), st.integers(0, 2**63)), max_size=5)),
        positions={NodeId(node): position for position, node in enumerate(nodes)},
        tenants=draw(st.lists(st.tuples(names_, shares, shares), max_size=5)),
        generation=draw(st.integers(0, 2**40)),
        epoch=draw(st.binary(min_size=16, max_size=16)),
    )


def as_lists(table: ShareTable) -> list[tuple[str, list[int] | None, list[int] | None]]:
    return [
        (tenant, None if dram is None else list(dram), None if nvme is None else list(nvme))
        for tenant, dram, nvme in table.tenants
    ]


@given(tables())
def test_share_table_survives_encoding(table: ShareTable) -> None:
    read = ShareTable.decode(table.encode())
    assert (read.reports, read.positions, read.generation, read.epoch) == (
        table.reports,
        table.positions,
        table.generation,
        table.epoch,
    )
    assert as_lists(read) == as_lists(table)


def large_table(generation: int) -> ShareTable:
    """256 quotas on 1,000 nodes, none of which compress."""
    numbers = np.random.default_rng(generation)
    nodes = {NodeId(f"node-{number}"): number for number in range(1_000)}
    tenants = [(f"tenant-{number}", *numbers.integers(0, 2**40, (2, len(nodes))).tolist()) for number in range(MAX_QUOTAS)]
    return ShareTable({}, nodes, tenants, generation, b"e" * 16)


def test_share_table_too_large_for_a_note_is_several() -> None:
    table, notes = large_table(2), large_table(2).notes()
    assert len(notes) > 1
    assert max(map(len, notes.values())) <= MAX_NOTE_BYTES
    read = ShareTable.read(notes.get)
    assert read is not None
    assert as_lists(read) == as_lists(table)
    mixed = {**notes, max(notes): large_table(1).notes()[max(notes)]}
    assert ShareTable.read(mixed.get) is None, "parts of two tables"
    small = ShareTable({}, {}, [], 3, b"e")
    assert ShareTable.read({**notes, **small.notes()}.get) == small
    assert ShareTable.read({}.get) is None


@given(st.dictionaries(st.just(SHARES_NOTE), st.binary(max_size=50), min_size=1))
def test_share_table_rejects_other_notes(notes: dict[str, bytes]) -> None:
    with pytest.raises(ValueError, match="record of quota shares"):
        ShareTable.read(notes.get)


@given(st.binary(max_size=50))
def test_share_table_rejects_other_bytes(note: bytes) -> None:
    with pytest.raises(ValueError, match="record of quota shares"):
        ShareTable.decode(note)


def test_share_table_older_generation_replaces_nothing() -> None:
    def table(generation: int, epoch: bytes = b"e") -> ShareTable:
        return ShareTable({}, {}, [], generation, epoch)

    assert table(1).replaces(None)
    assert table(2).replaces(table(1))
    assert not table(1).replaces(table(2))
    assert not table(2).replaces(table(2))
    assert table(1, b"f").replaces(table(2)), "the index lost everything"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"listen": "unix:/run/metadata.sock"}, "set metadata.advertise"),
        ({"listen": "0.0.0.0:7400", "advertise": "unix:/run/metadata.sock"}, "host:port"),
    ],
)
def test_config_of_shared_index_requires_an_address(tmp_path: Path, settings: dict[str, object], message: str) -> None:
    config = MetadataConfig(
        index_path=tmp_path / "index", engine="valkey://127.0.0.1:1", allow_insecure_remote=True, metrics_listen=None, **settings
    )
    with pytest.raises(InvalidArgument, match=message):
        config.check()
    if "listen" in settings and "advertise" not in settings:
        config.model_copy(update={"advertise": "10.0.0.1:7400"}).check()
        config.model_copy(update={"engine": "lmdb"}).check()


@pytest.mark.parametrize(
    ("bound", "peers", "address"),
    [
        ("10.0.0.1:7400", (), "10.0.0.1:7400"),
        ("0.0.0.0:7400", ("127.0.0.1:1",), "127.0.0.1:7400"),
        ("[::]:7400", ("127.0.0.1:1",), "127.0.0.1:7400"),
        ("0.0.0.0:7400", ("name.invalid:1", "127.0.0.1:1"), "127.0.0.1:7400"),
    ],
)
def test_reachable_address_of_all_interfaces_faces_the_peer(bound: str, peers: tuple[str, ...], address: str) -> None:
    assert reachable_address(bound, peers) == address


def test_reachable_address_without_route_is_unavailable() -> None:
    with pytest.raises(Unavailable):
        reachable_address("0.0.0.0:7400", ("name.invalid:1",))
