"""The part of the conformance suite about leases of roles. An index without leases rejects the calls."""

from __future__ import annotations

import time

import pytest

from kvstore.core.errors import InvalidArgument, Unsupported
from kvstore.index.contract import LeaseHolder, PrefixIndex, ServerRole
from kvstore.testing.index.process import IndexProcess

ONE, TWO = LeaseHolder("one", "127.0.0.1:1"), LeaseHolder("two", "127.0.0.1:2")


class LeasesSuite:
    """Behaviour of every index. ``IndexSuite`` has the fixtures."""

    def test_leases_are_taken_renewed_and_freed(self, index: PrefixIndex) -> None:
        if not index.leases_roles:
            pytest.skip("this index has no leases")
        roles, blocks, revision = list(ServerRole), index.stats().blocks, index.revision
        assert index.lease_holders() == {}
        assert index.take_leases([ServerRole.PLAN], ONE, 60.0) == {ServerRole.PLAN: ONE}
        others = {ServerRole.SWEEP: TWO, ServerRole.QUOTA: TWO}
        assert index.take_leases(roles, TWO, 60.0) == {ServerRole.PLAN: ONE, **others}
        assert index.take_leases(roles, ONE, 60.0) == {ServerRole.PLAN: ONE, **others}
        assert index.lease_holders() == {ServerRole.PLAN: ONE, **others}
        index.free_leases(roles, ONE)
        assert index.lease_holders() == others
        index.free_leases(roles, ONE)
        assert index.take_leases(roles, ONE, 60.0) == {ServerRole.PLAN: ONE, **others}
        assert (index.stats().blocks, index.revision) == (blocks, revision), "leases are no blocks and change no view"

    def test_leases_end_unless_renewed(self, index: PrefixIndex) -> None:
        if not index.leases_roles:
            pytest.skip("this index has no leases")
        index.take_leases([ServerRole.PLAN], ONE, 60.0)
        index.take_leases([ServerRole.PLAN], ONE, 0.05)
        deadline_s = time.monotonic() + 10.0
        while index.take_leases([ServerRole.PLAN], TWO, 60.0) != {ServerRole.PLAN: TWO}:
            assert time.monotonic() < deadline_s, "the lease of another holder did not end"
            time.sleep(0.01)
        assert index.take_leases([ServerRole.PLAN], ONE, 60.0) == {ServerRole.PLAN: TWO}

    @pytest.mark.parametrize(
        "holder", [LeaseHolder("", "a:1"), LeaseHolder("one", ""), LeaseHolder("one two", "a:1"), LeaseHolder("n" * 1_000, "a:1")]
    )
    def test_leases_of_invalid_holders_are_refused(self, index: PrefixIndex, holder: LeaseHolder) -> None:
        with pytest.raises(InvalidArgument if index.leases_roles else Unsupported):
            index.take_leases([ServerRole.PLAN], holder, 60.0)

    def test_leases_of_two_processes_have_one_holder(self, index: PrefixIndex, other_process: IndexProcess) -> None:
        if not index.leases_roles:
            pytest.skip("this index has no leases")
        roles = list(ServerRole)
        for _ in range(20):
            other_process.send("take_leases", roles, TWO, 60.0)
            ours = index.take_leases(roles, ONE, 60.0)
            assert ours == other_process.receive() == index.lease_holders() == other_process.call("lease_holders")
            assert set(ours) == set(roles)
            index.free_leases(roles, ONE)
            other_process.call("free_leases", roles, TWO)
            assert index.lease_holders() == {}
