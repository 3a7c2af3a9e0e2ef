"""Namespaces: equal specs are one, any difference changes the namespace, and other languages compute the same digest."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from kvstore.core import limits
from kvstore.core.errors import InvalidArgument
from kvstore.core.spec import CacheSpec, HashAlgorithm
from kvstore.core.types import BlockShape

VECTORS: list[dict[str, Any]] = json.loads((Path(__file__).parent / "golden" / "namespaces.json").read_text())["vectors"]
BASE: dict[str, Any] = {"model": "m", "block_tokens": 64, "layers": 4, "layer_block_bytes": 1024}
CHANGED: dict[str, Any] = {
    "model": "n",
    "weights_epoch": "e",
    "dtype": "fp8",
    "block_tokens": 65,
    "layers": 5,
    "layer_block_bytes": 1025,
    "layout": "x",
    "layout_version": 2,
    "shard_rank": 1,
    "shard_count": 3,
    "hash_algorithm": HashAlgorithm.SHA256_128,
    "tenant": "t",
    "salt": b"s",
}


@pytest.mark.parametrize("vector", VECTORS, ids=range(len(VECTORS)))
def test_golden_namespaces(vector: dict[str, Any]) -> None:
    spec = CacheSpec(**{**vector["spec"], "salt": bytes.fromhex(vector["spec"]["salt"])})
    assert spec.namespace.hex() == vector["namespace"]


def test_equal_specs_are_one_namespace() -> None:
    one, other = CacheSpec(**BASE), CacheSpec(**BASE)
    assert one == other
    assert hash(one) == hash(other)
    assert one.namespace == other.namespace
    assert len(one.namespace) == 16
    assert one.shape == BlockShape(4, 1024)
    assert one.block_bytes == 4096


def test_every_field_makes_another_namespace() -> None:
    assert set(CHANGED) == {field.name for field in dataclasses.fields(CacheSpec)}
    specs = [CacheSpec(**{"shard_count": 2, **BASE, name: value}) for name, value in CHANGED.items()]
    specs.append(CacheSpec(**BASE, shard_count=2))
    assert len({spec.namespace for spec in specs}) == len(specs)


def test_text_cannot_move_between_fields() -> None:
    one = CacheSpec(**{**BASE, "model": "ab"}, weights_epoch="c", tenant="d")
    other = CacheSpec(**{**BASE, "model": "a"}, weights_epoch="bc", tenant="d")
    third = CacheSpec(**{**BASE, "model": "ab"}, weights_epoch="cd", tenant="")
    assert len({one.namespace, other.namespace, third.namespace}) == 3


def test_hash_algorithm_by_name() -> None:
    assert CacheSpec(**BASE, hash_algorithm="sha256-128").hash_algorithm is HashAlgorithm.SHA256_128  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model", ""),
        ("model", "x" * (limits.MAX_NAME_BYTES + 1)),
        ("model", "ü" * (limits.MAX_NAME_BYTES // 2 + 1)),
        ("model", "\ud800"),
        ("model", "a\0b"),
        ("tenant", "line\nline"),
        ("layout", "\x1b[2J"),
        ("model", b"bytes"),
        ("model", None),
        ("dtype", ""),
        ("tenant", 7),
        ("block_tokens", 0),
        ("block_tokens", limits.MAX_BLOCK_TOKENS + 1),
        ("block_tokens", 64.0),
        ("block_tokens", True),
        ("layers", 0),
        ("layers", limits.MAX_LAYERS + 1),
        ("layer_block_bytes", 0),
        ("layer_block_bytes", -4096),
        ("layer_block_bytes", limits.MAX_LAYER_BLOCK_BYTES + 1),
        ("layer_block_bytes", limits.MAX_BLOCK_BYTES // 4 + 1),
        ("layout_version", 2**32),
        ("layout_version", -1),
        ("shard_count", 0),
        ("shard_count", limits.MAX_SHARDS + 1),
        ("shard_rank", 1),
        ("shard_rank", -1),
        ("hash_algorithm", "md5"),
        ("hash_algorithm", None),
        ("salt", "text"),
        ("salt", b"x" * (limits.MAX_SALT_BYTES + 1)),
    ],
)
def test_bad_fields_are_refused(field: str, value: object) -> None:
    with pytest.raises(InvalidArgument):
        CacheSpec(**{**BASE, field: value})


def test_long_salt_is_called_too_long() -> None:
    with pytest.raises(InvalidArgument, match="salt is too long"):
        CacheSpec(**{**BASE, "salt": b"x" * (limits.MAX_SALT_BYTES + 1)})
