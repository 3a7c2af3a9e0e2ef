"""Tests of operators' settings: the suite for both stores, and servers that lose, restart and edit in any order."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import json
import shutil
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from settings_suite import SettingsSuite, quota, reads

from kvstore.core.errors import CapacityExceeded, Unavailable
from kvstore.core.types import NamespaceId
from kvstore.metadata.retention import settings_store
from kvstore.metadata.retention.settings_store import (
    KNOWN_CHANGES,
    FileSettings,
    OperatorSettings,
    QuotaSetting,
    RuleSetting,
    SettingsStore,
)
from kvstore.metadata.retention.shared_settings import Reconciliation, SharedSettings, reconcile
from kvstore.observe.counters import Counters
from kvstore.process import atomic_file


class MemoryValue:
    """A shared value in memory, which can be lost, go back in time, or be out of reach."""

    def __init__(self) -> None:
        self.past: list[bytes | None] = [None]
        self.reachable = True
        self.meanwhile: Callable[[], Awaitable[object]] | None = None

    async def read(self) -> bytes | None:
        self._check()
        return self.past[-1]

    async def replace(self, before: bytes | None, after: bytes) -> bool:
        self._check()
        meanwhile, self.meanwhile = self.meanwhile, None
        if meanwhile is not None:
            await meanwhile()
        if self.past[-1] not in (before, after):
            return False
        self.past.append(after)
        return True

    def _check(self) -> None:
        if not self.reachable:
            raise Unavailable("Valkey does not answer")


class TestFileSettings(SettingsSuite):
    async def make(self, path: Path) -> SettingsStore:
        return FileSettings(path)


async def test_settings_locked_by_a_stopped_process_are_unavailable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(atomic_file, "LOCK_S", 0.05)
    store = FileSettings(tmp_path / "settings.json")
    with (tmp_path / "settings.json.lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(Unavailable):
            await store.change(lambda _: quota("t"))
    await store.change(lambda _: quota("t"))
    await reads(store, quota("t"))


class TestSharedSettings(SettingsSuite):
    other_file = "other-host.json"

    @pytest.fixture(autouse=True)
    def value(self) -> None:
        self.shared = MemoryValue()

    async def make(self, path: Path) -> SettingsStore:
        return SharedSettings(FileSettings(path), self.shared, Counters())

    async def test_settings_out_of_reach_are_handed_out_only(self, mine: SettingsStore) -> None:
        await mine.change(lambda known: known.with_quota("a", QuotaSetting(1)))
        self.shared.reachable = False
        with pytest.raises(Unavailable):
            await mine.change(lambda known: known.with_quota("a", QuotaSetting(2)))
        assert mine.read() == quota("a")

    async def test_settings_lost_value_is_restored(self, mine: SettingsStore, theirs: SettingsStore) -> None:
        await mine.change(lambda known: known.with_quota("a", QuotaSetting(1)))
        self.shared.past.append(None)
        await reads(theirs, quota("a"))
        _, after = await theirs.change(lambda known: known.with_quota("b", QuotaSetting(1)))
        assert (set(after.quotas), after.revision) == ({"a", "b"}, 2)

    async def test_settings_of_a_single_host_are_shared(self, tmp_path: Path) -> None:
        """A server that used LMDB before, whose file lacks a revision."""
        path = tmp_path / "orders.json"
        path.write_bytes(b'{"version": 2, "quotas": {"a": {"dram": 1, "nvme": null}}, "namespaces": {}}')
        first, second = await self.make(path), await self.make(tmp_path / "other-host.json")
        for store in (first, second):
            await store.start()
            await store.stop()
        assert second.read() == OperatorSettings({"a": QuotaSetting(1)})

    async def test_settings_full_disk_keeps_change_in_memory(self, mine: SettingsStore, monkeypatch: pytest.MonkeyPatch) -> None:
        def full(path: Path, raw: bytes) -> None:
            raise OSError(errno.ENOSPC, "full")

        with monkeypatch.context() as patch:
            patch.setattr(settings_store, "write_atomically", full)
            await mine.change(lambda known: known.with_quota("a", QuotaSetting(1)))
            assert mine.read() == quota("a"), "it is in force at all servers"
            assert not mine.path.exists()
        copy = FileSettings(mine.path)
        await reads(copy, quota("a"))


async def test_file_settings_full_disk_refuses_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, raw: bytes) -> None:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(settings_store, "write_atomically", full)
    store = FileSettings(tmp_path / "orders.json")
    with pytest.raises(CapacityExceeded):
        await store.change(lambda known: known.with_quota("a", QuotaSetting(1)))
    assert store.read() == OperatorSettings()


@st.composite
def histories(draw: st.DrawFn) -> list[OperatorSettings]:
    """Settings that were made from each other in any way; the first ones are those of a new server."""
    made = [OperatorSettings()]
    for number in range(draw(st.integers(1, 8))):
        origin = draw(st.sampled_from(made))
        made.append(origin.edited(lambda known, number=number: known.with_quota("a", QuotaSetting(number + 1))))  # type: ignore[misc]
    return made


@given(histories(), st.data())
def test_reconcile_in_any_order_gives_all_servers_the_same(made: list[OperatorSettings], data: st.DataObject) -> None:
    some = st.sampled_from(made)
    copies = data.draw(st.lists(some, min_size=1, max_size=5))
    shared = data.draw(st.one_of(st.none(), some))
    newest = [one for one in copies if all(one.descends_from(other) for other in (*copies, *([shared] if shared else [])))]
    began = shared
    for _ in range(2):
        for number, copy in enumerate(copies):
            decided = reconcile(copy, shared)
            assert shared is None or decided.settings.descends_from(shared), "what is shared is never dropped"
            assert decided.lost in (None, copy)
            if decided.write_shared:
                shared = decided.settings
            copies[number] = decided.settings
    assert copies == [shared or OperatorSettings()] * len(copies)
    assert began is None or copies[0].descends_from(began)
    if newest:
        assert copies[0] == newest[0], "if one is the newest of all, it is in force"
    for copy in copies:
        assert reconcile(copy, shared) == Reconciliation(copy, write_shared=False)


def test_settings_of_version_1_are_refused_with_the_rename() -> None:
    namespace = NamespaceId(b"n" * 16)
    stored = json.dumps({"version": 1, "namespaces": {namespace.hex(): {"ttl_ms": 0, "pinned": True, "copies": 1}}}).encode()
    with pytest.raises(ValueError, match='rename the field and set "version" to 2'):
        OperatorSettings.decode(stored)
    renamed = json.loads(stored.replace(b"pinned", b"kept")) | {"version": 2}
    assert OperatorSettings.decode(json.dumps(renamed).encode()).rules == {namespace: RuleSetting(kept=True)}


def test_settings_far_behind_are_an_origin() -> None:
    made = [OperatorSettings()]
    for number in range(2 * KNOWN_CHANGES):
        made.append(made[-1].edited(lambda known, number=number: known.with_quota("a", QuotaSetting(number + 1))))  # type: ignore[misc]
    newest = OperatorSettings.decode(made[-1].encode())
    assert all(newest.descends_from(one) for one in made)
    assert not any(one.descends_from(newest) for one in made[:-1])
    aside = made[-3].edited(lambda known: known.with_quota("b", QuotaSetting(1)))
    assert not newest.descends_from(aside)
    assert not aside.descends_from(newest)


servers = st.integers(0, 2)


class SettingsMachine(RuleBasedStateMachine):
    """Three servers, their files, and the shared value, which may be lost or go back in time. A change sets one quota.

    Without such a loss no acknowledged change may be missing. With it, a change may be missing only if other changes were made
    from older settings at that time, and all servers have the same settings in the end.
    """

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="settings-"))
        self.runner = asyncio.Runner()
        self.value = MemoryValue()
        self.changes = 0
        self.acknowledged: dict[str, int] = {}
        self.value_was_lost = False
        self.seen = [OperatorSettings()] * 3

    @initialize()
    def begin(self) -> None:
        self.stores = [self.store(number) for number in range(3)]

    def store(self, number: int) -> SharedSettings:
        return SharedSettings(FileSettings(self.folder / f"{number}.json"), self.value, Counters())

    def teardown(self) -> None:
        self.value.reachable = True
        for _ in range(2):
            for store in self.stores:
                self.runner.run(store.synchronise())
        found = [store.read() for store in self.stores]
        assert found[0] == found[1] == found[2]
        assert found[0] is not None
        if not self.value_was_lost:
            assert {tenant: one.dram for tenant, one in found[0].quotas.items()} == self.acknowledged
        self.runner.close()
        shutil.rmtree(self.folder)

    async def edit(self, number: int) -> None:
        self.changes += 1
        tenant, bound = f"t{self.changes % 4}", self.changes
        _, after = await self.stores[number].change(lambda known: known.with_quota(tenant, QuotaSetting(bound)))
        assert after.quotas[tenant] == QuotaSetting(bound)
        self.acknowledged[tenant] = bound

    @rule(number=servers)
    def change(self, number: int) -> None:
        if self.value.reachable:
            self.runner.run(self.edit(number))
        else:
            before = self.stores[number].read()
            with pytest.raises(Unavailable):
                self.runner.run(self.edit(number))
            assert self.stores[number].read() == before

    @precondition(lambda self: self.value.reachable)
    @rule(number=servers, other=servers)
    def change_at_the_same_time(self, number: int, other: int) -> None:
        self.value.meanwhile = lambda: self.edit(other)
        self.runner.run(self.edit(number))
        self.value.meanwhile = None

    @precondition(lambda self: self.value.reachable)
    @rule(number=servers)
    def synchronise(self, number: int) -> None:
        self.runner.run(self.stores[number].synchronise())

    @rule(number=servers)
    def restart(self, number: int) -> None:
        before = self.stores[number].read()
        self.stores[number] = self.store(number)
        assert self.stores[number].read() == before

    @rule(number=servers)
    def lose_a_host(self, number: int) -> None:
        (self.folder / f"{number}.json").unlink(missing_ok=True)
        self.stores[number] = self.store(number)
        self.seen[number] = OperatorSettings()

    @rule()
    def cut_off_or_join(self) -> None:
        self.value.reachable = not self.value.reachable

    @rule(number=servers)
    def lose_all_but_one_server(self, number: int) -> None:
        """All of Valkey and all other hosts: what the last server had is in force everywhere in the end."""
        kept = self.stores[number].read()
        self.value.reachable = True
        self.value.past.append(None)
        for other in {0, 1, 2} - {number}:
            self.lose_a_host(other)
        for _ in range(2):
            for store in self.stores:
                self.runner.run(store.synchronise())
        assert [store.read() for store in self.stores] == [kept] * 3
        if not self.value_was_lost and kept is not None:
            self.acknowledged = {tenant: one.dram or 0 for tenant, one in kept.quotas.items()}

    @rule(back=st.integers(0, 3))
    def go_back_in_time(self, back: int) -> None:
        """A replica takes over that lacks the last changes."""
        self.value.past.append(self.value.past[-1 - min(back, len(self.value.past) - 1)])
        self.value_was_lost = True

    @invariant()
    def no_copy_is_older_than_before(self) -> None:
        for number, store in enumerate(getattr(self, "stores", ())):
            copy = store.read()
            assert copy is not None
            assert self.value_was_lost or copy.descends_from(self.seen[number])
            self.seen[number] = copy


class TestSettingsMachine(SettingsMachine.TestCase):
    settings = settings(SettingsMachine.TestCase.settings, max_examples=25, stateful_step_count=20, deadline=None)
