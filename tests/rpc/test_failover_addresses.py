"""Settings that name several metadata servers: accepted texts, errors, resolution of names."""

from __future__ import annotations

import pytest

from kvstore.core.errors import InvalidArgument
from kvstore.rpc.failover.addresses import MAX_SERVERS, MetadataAddresses, entries_of
from kvstore.rpc.failover.resolver import resolve


@pytest.mark.parametrize(
    ("text", "entries", "names"),
    [
        ("127.0.0.1:7400", ["127.0.0.1:7400"], []),
        ("localhost:7400", ["localhost:7400"], []),
        ("[::1]:7400", ["[::1]:7400"], []),
        ("unix:/run/metadata.sock", ["unix:/run/metadata.sock"], []),
        ("metadata.example:7400", ["metadata.example:7400"], ["metadata.example:7400"]),
        ("dns:metadata:7400", ["metadata:7400"], ["metadata:7400"]),
        ("a:7400, b:7400", ["a:7400", "b:7400"], []),
        ("a:7400,dns:b:7400", ["a:7400", "b:7400"], ["b:7400"]),
    ],
)
def test_addresses_parse_reads_lists_and_names(text: str, entries: list[str], names: list[str]) -> None:
    parsed = MetadataAddresses.parse(text)
    assert list(parsed.entries) == entries
    assert parsed.names == frozenset(names)
    assert MetadataAddresses.parse(str(parsed)) == parsed


def test_addresses_only_is_one_server_without_dns() -> None:
    assert MetadataAddresses.parse("127.0.0.1:7400").only == "127.0.0.1:7400"
    assert MetadataAddresses.parse("unix:/run/m.sock").only == "unix:/run/m.sock"
    assert MetadataAddresses.parse("metadata:7400").only is None
    assert MetadataAddresses.parse("10.0.0.1:1,10.0.0.2:1").only is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "empty address"),
        ("a:1,,b:1", "empty address"),
        ("a:1,a:1", "twice"),
        ("a", "must be"),
        ("a:1,b:99999", "must be"),
        ("dns:10.0.0.1:7400", "requires a host name"),
        (",".join(f"h{number}:1" for number in range(MAX_SERVERS + 1)), "too many"),
    ],
)
def test_addresses_malformed_raises_with_the_reason(text: str, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        MetadataAddresses.parse(text)


def test_entries_of_unix_socket_is_not_split() -> None:
    assert entries_of("unix:/run/a,b.sock") == ("unix:/run/a,b.sock",)


def test_resolve_sorts_and_bounds_the_addresses() -> None:
    assert resolve("m:7400", lambda *_: ["10.0.0.2", "10.0.0.1", "fd00::1", "10.0.0.2"]) == [
        "10.0.0.1:7400",
        "10.0.0.2:7400",
        "[fd00::1]:7400",
    ]
    assert len(resolve("m:7400", lambda *_: [f"10.0.0.{last}" for last in range(100)])) == MAX_SERVERS
