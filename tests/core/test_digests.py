"""Range digests: the vectorised implementation against the plain one."""

from __future__ import annotations

from collections import defaultdict

from hypothesis import given
from hypothesis import strategies as st

from kvstore.core.checksum import digest_keys, key_range
from kvstore.core.types import BlockKey
from support.digests import digest_ranges

KEYS = st.sets(st.binary(min_size=16, max_size=16).map(BlockKey), max_size=50)


@given(KEYS)
def test_digests_of_all_ranges_match_single_ranges(keys: set[BlockKey]) -> None:
    by_range: dict[int, list[BlockKey]] = defaultdict(list)
    for key in keys:
        by_range[int.from_bytes(key[:2], "big") >> 4].append(key)
        assert key_range(key) == int.from_bytes(key[:2], "big") >> 4
    digests, counts = digest_ranges(b"".join(keys))
    assert len(digests) == len(counts) == 4096
    for number in range(4096):
        assert int(digests[number]) == digest_keys(by_range[number])
        assert int(counts[number]) == len(by_range[number])


@given(KEYS)
def test_digest_key_added_and_removed_is_unchanged(keys: set[BlockKey]) -> None:
    extra = BlockKey(b"\xaa" * 16)
    once = digest_keys(sorted(keys | {extra}))
    assert once ^ digest_keys([extra]) == digest_keys(keys - {extra})
