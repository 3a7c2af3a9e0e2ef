"""What other sides say of their agents, and where they want bytes: judged before NIXL sees it, so that no NIXL is needed here."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.core.errors import InvalidArgument
from kvstore.node.config import NodeConfig
from kvstore.node.one_sided import NixlPorts
from kvstore.observe.counters import Counters
from kvstore.transport.nixl.landing import Rows
from kvstore.transport.nixl.metadata import MOST_BYTES, BadMetadata, read_metadata
from kvstore.transport.nixl.port import NixlOptions, Region

NAME = b"n1-reads-" + b"0123456789abcdef" * 2
MIB = 1 << 20
TOP = 1 << 64


def item(tag: bytes, value: bytes) -> bytes:
    return tag + struct.pack("<Q", len(value)) + value + b"|"


def metadata(
    name: bytes = NAME, regions: Sequence[tuple[int, int]] = ((MIB, MIB), (4 * MIB, MIB)), count: int | None = None
) -> bytes:
    """As NIXL 1.5 writes it."""
    said = len(regions) if count is None else count
    return b"nixlSerDes|" + b"".join(
        [
            item(b"Agent", name), item(b"Conns", struct.pack("<Q", 1)), item(b"t", b"UCX"), item(b"c", b"\x00address|of UCX"),
            item(b"", b"MemSection"), item(b"nixlSecElms", struct.pack("<Q", 1)), item(b"bknd", b"UCX"),
            item(b"nixlDList", b"nixlSDList"), item(b"t", bytes(4)), item(b"n", struct.pack("<Q", said)),
            *(item(b"", struct.pack("<QQQ", begin, size, 0) + b"key") for begin, size in regions),
        ]
    )  # fmt: skip


def rows(*pieces: tuple[int, int]) -> Rows:
    return np.array([(begin, size, 0) for begin, size in pieces], np.uint64)


def test_an_agent_of_ours_is_read() -> None:
    found = read_metadata(metadata())
    assert found.name == NAME.decode()
    assert found.regions.tolist() == [[MIB, 2 * MIB], [4 * MIB, 5 * MIB]]


@pytest.mark.parametrize(
    "data",
    [
        b"", b"nixlSerDes|", metadata() + b"x", metadata()[:-1], b"x" + metadata()[1:],
        metadata(name=b"n1\xff" + NAME[2:]), metadata(name=b"somebody"), metadata(name=b"../" + NAME), metadata(name=b""),
        metadata(name=b"n" * 300 + NAME), metadata(regions=()), metadata(count=3), metadata(count=1), metadata(count=TOP - 1),
        metadata(regions=((0, MIB),)), metadata(regions=((MIB, 0),)), metadata(regions=((TOP - 4096, 4096),)),
        metadata(regions=((MIB, TOP - 1),)), metadata(regions=((MIB, 1),) * 257),
        metadata().replace(b"UCX", b"GDS", 1), metadata() + bytes(MOST_BYTES),
    ],
)  # fmt: skip
def test_what_is_not_of_ours_is_refused(data: bytes) -> None:
    with pytest.raises(BadMetadata):
        read_metadata(data)


@given(st.binary(max_size=200), st.integers(0, 400), st.integers(0, 255))
def test_whatever_comes_is_read_or_refused(noise: bytes, at: int, byte: int) -> None:
    flipped = bytearray(metadata())
    flipped[at % len(flipped)] = byte
    for data in (noise, b"nixlSerDes|" + noise, metadata()[:at] + noise, bytes(flipped)):
        try:
            found = read_metadata(data)
        except BadMetadata:
            continue
        assert (found.regions[:, 0] < found.regions[:, 1]).all()


@pytest.mark.parametrize(
    ("pieces", "held"),
    [
        ([(MIB, MIB)], True),
        ([(MIB, 4096), (5 * MIB - 1, 1)], True),
        ([(MIB - 1, 4096)], False),
        ([(2 * MIB - 1, 2)], False),
        ([(MIB, 4 * MIB)], False),
        ([(0, 4096)], False),
        ([(MIB, 4096), (3 * MIB, 4096)], False),
        ([(TOP - 2048, 4096)], False),
        ([(MIB + 4096, TOP - 4096)], False),
    ],
)
def test_bytes_go_only_into_what_was_registered(pieces: list[tuple[int, int]], held: bool) -> None:
    assert read_metadata(metadata()).holds(rows(*pieces)) is held


def test_a_node_uses_nixl_only_where_all_who_reach_it_are_trusted() -> None:
    with pytest.raises(InvalidArgument, match="may read and write its memory and end it"):
        NodeConfig(node_id="n1", nixl=NixlOptions())


def test_a_node_of_loopback_opens_no_ports_of_nixl_beyond_its_host_unasked() -> None:
    config = NodeConfig(node_id="n1", nixl=NixlOptions(devices="eth0"), nixl_trusted_network=True)
    with pytest.raises(InvalidArgument, match="beyond this host"):
        NixlPorts(config, Region(MIB, MIB), Counters())
