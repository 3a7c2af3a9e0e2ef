"""The enums of the value types carry the numbers of the proto enums of the same names."""

from __future__ import annotations

import pytest

from kvproto.v1 import common_pb2
from kvstore.core.types import Outcome, StoreOutcome, Tier, pack_keys, unpack_keys


@pytest.mark.parametrize(
    ("ours", "theirs", "prefix"),
    [
        (Tier, common_pb2.Tier, "TIER_"),
        (Outcome, common_pb2.Outcome, "OUTCOME_"),
        (StoreOutcome, common_pb2.StoreOutcome, "STORE_OUTCOME_"),
    ],
)
def test_numbers_are_those_of_the_proto(ours: type[Tier | Outcome | StoreOutcome], theirs: object, prefix: str) -> None:
    numbers = {name.removeprefix(prefix): number for name, number in theirs.items()}  # type: ignore[attr-defined]
    assert numbers.pop("UNSPECIFIED") == 0
    assert numbers == {member.name: member.value for member in ours}


def test_packed_keys() -> None:
    keys = unpack_keys(bytes(range(48)))
    assert [len(key) for key in keys] == [16, 16, 16]
    assert pack_keys(keys) == bytes(range(48))
    with pytest.raises(ValueError, match="16 bytes"):
        unpack_keys(b"x" * 17)
