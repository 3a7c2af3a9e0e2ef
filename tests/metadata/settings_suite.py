"""Conformance suite of ``SettingsStore``: the same tests for the file of one host and for settings that servers share."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kvstore.core.errors import Conflict, InvalidArgument
from kvstore.core.types import NamespaceId
from kvstore.metadata.retention.settings_store import OperatorSettings, QuotaSetting, RuleSetting, SettingsStore
from support.wait import wait_until_async

WRONG = [
    b"",
    b"[]",
    b"{}",
    b'{"version": 1}',
    b'{"version": 3}',
    b'{"version": 2, "quotas": {"a": 3}}',
    b'{"version": 2, "quotas": {"a": {"dram": -1}}}',
    b'{"version": 2, "quotas": {"a": {"dram": true}}}',
    b'{"version": 2, "namespaces": {"xyz": {"ttl_ms": 1}}}',
    b'{"version": 2, "quotas": null}',
    b'{"version": 2, "quotas": []}',
    b'{"version": 2, "namespaces": 7}',
    b'{"version": 2, "namespaces": {"ab": {"ttl_ms": 1}}}',
    b'{"version": 2, "namespaces": {"ab cd ef ab cd ef ab cd ef ab cd ": {"ttl_ms": 1}}}',
    b'{"version": 2, "quotas": {"\\ud800": {"dram": 1}}}',
    b'{"version": 2, "quotas": {"a\\u0007": {"dram": 1}}}',
    b'{"version": 2, "quotas": {"' + b"x" * 513 + b'": {"dram": 1}}}',
    b'{"version": 2, "quotas": {' + b",".join(b'"%d": {}' % number for number in range(257)) + b"}}",
    b'{"version": 2, "quotas": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    b'{"version": 2, "quotas": {"a": {"dram": ' + b"9" * 5_000 + b"}}}",
    b'{"version": 2}' + b" " * (4 << 20),
    b"\xff\xfe\x00",
    b'{"version": 2, "revision": -1}',
    b'{"version": 2, "path_policy": 7}',
    b'{"version": 2, "changes": ["a"]}',
]


def quota(tenant: str, dram: int = 1) -> OperatorSettings:
    """Settings with one quota, as after one change."""
    return OperatorSettings({tenant: QuotaSetting(dram)}, revision=1)


async def reads(store: SettingsStore, expected: OperatorSettings) -> None:
    """Wait until a store hands out these settings."""

    async def same() -> bool:
        return store.read() == expected

    await wait_until_async(same, lambda: f"{store.read()} is not {expected}")


class SettingsSuite(ABC):
    """The tests. A subclass makes stores."""

    @abstractmethod
    async def make(self, path: Path) -> SettingsStore:
        """A store of a server whose file is ``path``. All stores of one test have the same settings."""

    @pytest.fixture
    async def mine(self, tmp_path: Path) -> AsyncIterator[SettingsStore]:
        store = await self.make(tmp_path / "orders.json")
        await store.start()
        yield store
        await store.stop()

    @pytest.fixture
    async def theirs(self, tmp_path: Path) -> AsyncIterator[SettingsStore]:
        """The store of another process."""
        store = await self.make(tmp_path / self.other_file)
        await store.start()
        yield store
        await store.stop()

    other_file = "orders.json"

    async def test_settings_change_is_read(self, mine: SettingsStore) -> None:
        assert mine.read() == OperatorSettings()
        before, after = await mine.change(lambda known: known.with_quota("a", QuotaSetting(1)))
        assert (before, after) == (OperatorSettings(), quota("a"))
        assert mine.read() == after
        rule = RuleSetting(5_000, True)
        before, after = await mine.change(lambda known: known.with_rule(NamespaceId(bytes(16)), rule))
        assert before == quota("a")
        assert (after.revision, dict(after.rules), dict(after.quotas)) == (2, {bytes(16): rule}, dict(before.quotas))

    async def test_settings_equal_change_keeps_revision(self, mine: SettingsStore) -> None:
        await mine.change(lambda known: known.with_quota("a", QuotaSetting(1)))
        before, after = await mine.change(lambda known: known.with_quota("a", QuotaSetting(1)))
        assert before == after == quota("a")

    async def test_settings_refused_edit_changes_nothing(self, mine: SettingsStore) -> None:
        def refuse(known: OperatorSettings) -> OperatorSettings:
            raise InvalidArgument("no")

        with pytest.raises(InvalidArgument, match="no"):
            await mine.change(refuse)
        assert mine.read() == OperatorSettings()

    async def test_settings_change_of_other_process_is_seen(self, mine: SettingsStore, theirs: SettingsStore) -> None:
        await theirs.change(lambda known: known.with_quota("a", QuotaSetting(1)))
        await reads(mine, quota("a"))
        _, both = await mine.change(lambda known: known.with_quota("b", QuotaSetting(None, 2)))
        assert set(both.quotas) == {"a", "b"}
        await reads(theirs, both)
        before = mine.read()
        assert mine.read() is before, "read again only where it has changed"

    async def test_settings_concurrent_changes_are_all_kept(self, mine: SettingsStore, theirs: SettingsStore) -> None:
        await asyncio.gather(
            *(
                store.change(lambda known, name=name: known.with_quota(name, QuotaSetting(1)))  # type: ignore[misc]
                for name, store in zip("abcdefgh", [mine, theirs] * 4, strict=True)
            )
        )
        _, after = await mine.change(lambda known: known)
        assert (set(after.quotas), after.revision) == (set("abcdefgh"), 8)
        await reads(theirs, after)

    async def test_settings_expected_value_holds_over_processes(self, mine: SettingsStore, theirs: SettingsStore) -> None:
        """The condition of an edit is judged by the newest settings, not by this process's copy."""

        def first(known: OperatorSettings) -> OperatorSettings:
            if known.quotas:
                raise Conflict("the other was first")
            return known.with_quota("a", QuotaSetting(1))

        await theirs.change(first)
        with pytest.raises(Conflict, match="the other was first"):
            await mine.change(first)

    async def test_settings_survive_a_restart(self, tmp_path: Path, mine: SettingsStore) -> None:
        await mine.change(lambda known: known.with_quota("a", QuotaSetting(1)))
        again = await self.make(mine.path)
        assert again.read() == quota("a")

    @pytest.mark.parametrize("raw", WRONG, ids=lambda raw: raw[:48].decode(errors="replace"))
    async def test_settings_unreadable_file_is_kept(self, mine: SettingsStore, raw: bytes) -> None:
        mine.path.write_bytes(raw)
        assert mine.read() is None
        assert mine.problem
        with pytest.raises(Conflict):
            await mine.change(lambda known: known.with_quota("a", QuotaSetting(1)))
        assert mine.path.read_bytes() == raw
        mine.path.unlink()
        assert mine.read() == OperatorSettings()
