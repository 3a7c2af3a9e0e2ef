"""Payloads: any byte that differs from the payload of its key is detected."""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.core.errors import InvalidArgument
from kvstore.core.types import BlockKey
from kvstore.workload.payload import Payloads

SIZES = [16, 17, 23, 31, 32, 100, 512, 513, 1000, 1024, 4096, 4104, 65_536, 300_000, 1 << 20]


def keys_of(count: int, seed: int = 0) -> list[BlockKey]:
    return [BlockKey(hashlib.sha256(f"{seed}/{number}".encode()).digest()[:16]) for number in range(count)]


def filled(payloads: Payloads, keys: list[BlockKey]) -> npt.NDArray[np.uint8]:
    out = np.zeros((len(keys), payloads.block_bytes), dtype=np.uint8)
    payloads.fill(keys, out)
    return out


def expected_block(payloads: Payloads, key: bytes) -> npt.NDArray[np.uint8]:
    """The same, byte by byte: PAD is the payload of the zero key."""
    pad = filled(payloads, [BlockKey(bytes(16))])[0]
    repeated = np.frombuffer((key * (payloads.block_bytes // 16 + 1))[: payloads.block_bytes], dtype=np.uint8)
    return pad ^ repeated


@pytest.mark.parametrize("size", SIZES)
def test_a_payload_is_pad_xor_key(size: int) -> None:
    payloads = Payloads(size)
    keys = keys_of(5)
    blocks = filled(payloads, keys)
    for key, block in zip(keys, blocks, strict=True):
        assert (block == expected_block(payloads, key)).all()
    assert payloads.wrong_blocks(keys, blocks) == []
    assert payloads.wrong_blocks(b"".join(keys), blocks) == []
    assert payloads.wrong_bytes(keys, blocks) == 0


def test_the_pad_is_fixed() -> None:
    digest = hashlib.sha256(filled(Payloads(4096), keys_of(3)).tobytes()).hexdigest()
    assert digest == "df7980c4bc92ccce5c2ea64fa9d29081e62f5c61589c861a29faa7f3492d232f"


@pytest.mark.parametrize("size", [16, 24, 4096])
def test_no_blocks(size: int) -> None:
    payloads = Payloads(size)
    empty = np.zeros((0, size), dtype=np.uint8)
    payloads.fill([], empty)
    assert payloads.wrong_blocks([], empty) == []


@pytest.mark.parametrize("size", [100, 4096, 5000, 300_000])
def test_blocks_may_lie_apart(size: int) -> None:
    payloads = Payloads(size)
    keys = keys_of(7)
    wide = np.zeros((14, size + 3), dtype=np.uint8)
    view = wide[::2, 1 : size + 1]
    payloads.fill(keys, view)
    assert (view == filled(payloads, keys)).all()
    assert payloads.wrong_blocks(keys, view) == []
    assert not wide[1::2].any()
    assert not wide[:, 0].any()
    assert not wide[:, size + 1 :].any()


def mutations() -> st.SearchStrategy[str]:
    return st.sampled_from(
        ["bit", "shift", "rotate words", "swap halves", "swap blocks", "foreign", "stale tail", "zero tail", "short"]
    )


@given(
    size=st.sampled_from(SIZES[:12]),
    count=st.integers(2, 9),
    kind=mutations(),
    data=st.data(),
)
def test_every_mutation_is_seen_and_only_where_it_is(size: int, count: int, kind: str, data: st.DataObject) -> None:
    payloads = Payloads(size)
    keys = keys_of(count)
    good = filled(payloads, keys)
    blocks = good.copy()
    victim = data.draw(st.integers(0, count - 1))
    other = (victim + data.draw(st.integers(1, count - 1))) % count
    at = data.draw(st.integers(0, size - 1))
    match kind:
        case "bit":
            blocks[victim, at] ^= 1 << data.draw(st.integers(0, 7))
        case "shift":
            blocks[victim] = np.roll(blocks[victim], data.draw(st.integers(1, size - 1)))
        case "rotate words":
            blocks[victim] = np.roll(blocks[victim], 16) if size > 16 else np.roll(blocks[victim], 8)
        case "swap halves":
            half = size // 2
            blocks[victim] = np.concatenate((good[victim, half : 2 * half], good[victim, :half], good[victim, 2 * half :]))
        case "swap blocks":
            blocks[[victim, other]] = blocks[[other, victim]]
        case "foreign":
            blocks[victim] = filled(payloads, keys_of(1, seed=9))[0]
        case "stale tail":
            blocks[victim, at:] = filled(payloads, keys_of(1, seed=8))[0, at:]
        case "zero tail":
            blocks[victim, at:] = 0
        case "short":
            blocks[victim, at:] = good[other, at:]
    differs = blocks != good
    assert payloads.wrong_blocks(keys, blocks) == [int(row) for row in np.flatnonzero(differs.any(axis=1))]
    assert payloads.wrong_bytes(keys, blocks) == int(differs.sum())


def test_wrong_shapes_are_refused() -> None:
    payloads = Payloads(64)
    keys = keys_of(2)
    for wrong in (
        np.zeros((2, 63), dtype=np.uint8),
        np.zeros(128, dtype=np.uint8),
        np.zeros((2, 16), dtype=np.uint32),
        np.zeros((3, 64), dtype=np.uint8),
        np.zeros((2, 128), dtype=np.uint8)[:, ::2],
    ):
        with pytest.raises(InvalidArgument):
            payloads.wrong_blocks(keys, wrong)  # type: ignore[arg-type]
    for size in (0, 15, 1 << 40):
        with pytest.raises(InvalidArgument):
            Payloads(size)
