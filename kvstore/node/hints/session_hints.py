"""Applies hints about sessions to the blocks of this node.

A protected block stays in the last tier of the node: on its volumes, or in DRAM of a node without volumes. If there are volumes,
it may be evicted from DRAM, and is read back shortly before the session's next turn. An ended session's blocks are evicted first.
Rules of operators outrank hints: kept namespaces, times to live, quotas and evictions on request.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
import traceback
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, NamedTuple

from kvstore.core.chain import ChainSlice
from kvstore.core.clock import Clock
from kvstore.core.errors import KVStoreError, Unavailable
from kvstore.core.limits import MAX_TENANTS_TOLD
from kvstore.core.types import BlockKey, Tier
from kvstore.node.ahead.read_ahead import AheadReader
from kvstore.node.eviction.usage import held_bytes
from kvstore.node.hints.ledger import ChainEnd, HintLedger, Limits, Released, SessionHint, parts_of
from kvstore.node.loads.runs import BlockRequest
from kvstore.node.state.model import Block
from kvstore.node.state.namespaces import NodeNamespace, TenantAccount
from kvstore.node.table import BlockTable
from kvstore.observe.counters import Counters
from kvstore.observe.limited_log import LimitedLog
from kvstore.observe.metric_definitions import node as node_metrics
from kvstore.process.threads.submission import submit
from kvstore.tiers.allocator import round_up

_log: Final = LimitedLog(logging.getLogger(__name__))
PROTECTED_PART: Final = 0.9
"""Fraction of a tier, without the blocks of kept namespaces, that hints of all tenants may protect together."""
AHEAD_S: Final = 2.0
"""How long before the expected turn a session's blocks are read into DRAM."""
READ_S: Final = 5.0
MAX_READS: Final = 4
MAX_WAITING_READS: Final = 64


class HintResult(NamedTuple):
    """Blocks that a hint concerned."""

    protected: int = 0
    dropped: int = 0


@dataclass(slots=True)
class TenantTotals:
    """Hints of one tenant since the node started."""

    keeps: int = 0
    ends: int = 0
    beyond_limit_blocks: int = 0
    dropped_blocks: int = 0


class SessionHints:
    """Hints of one node. Thread-safe.

    Args:
        table: the node's blocks.
        ahead: reads blocks into DRAM.
        share: fraction of the node's last tier, or of its quota there, that one tenant may protect if other tenants have blocks
            there too; 0: hints are ignored.
        counters: metrics.
        clock: time.
    """

    def __init__(self, table: BlockTable, ahead: AheadReader, share: float, counters: Counters, clock: Clock) -> None:
        self._table = table
        self._residency = table.residency
        self._ahead = ahead
        self._share = share
        self._counters = counters
        self._clock = clock
        self._one_hint = threading.Lock()
        """Held while the parts of one hint are applied: parts of two hints for one session must not mix."""
        self._ledger = HintLedger()
        self._totals: dict[str, TenantTotals] = {}
        self._pool = ThreadPoolExecutor(MAX_READS, thread_name_prefix="kvstore-next-turn")
        self._reads: set[Future[int]] = set()

    def close(self) -> None:
        """Read nothing more ahead."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    # ---- hints
    def keep(self, namespace: NodeNamespace, hint: SessionHint) -> HintResult:
        """Protect the blocks of a session between its turns.

        Raises:
            CapacityExceeded: too many sessions have hints.
        """
        if not self._share:
            return self._ignored()
        with self._one_hint:
            return self._keep(namespace, hint)

    def _keep(self, namespace: NodeNamespace, hint: SessionHint) -> HintResult:
        self._counters.add(node_metrics.HINTS["keep"])
        now_s, tenant = self._clock.now_s(), _tenant_of(namespace)
        with self._residency.lock:
            size, limits = self._slot_bytes(namespace), self._limits(namespace, self._holders())
        count = last = 0
        for last, keys in enumerate(parts_of(list(dict.fromkeys(hint.keys)))):
            kept = self._keep_part(tenant, namespace, hint._replace(keys=keys), size, limits, now_s, last)
            count += kept
            if kept < len(keys):
                break
        self._release(namespace, hint.name, last + 1)
        self._counters.add(node_metrics.HINTED_BLOCKS["protected"], count)
        self._counters.add(node_metrics.HINTED_BLOCKS["beyond_limit"], len(hint.keys) - count)
        totals = self._totals_of(tenant)
        totals.keeps += 1
        totals.beyond_limit_blocks += len(hint.keys) - count
        return HintResult(protected=count)

    def _keep_part(
        self, tenant: str, namespace: NodeNamespace, hint: SessionHint, size: int, limits: Limits, now_s: float, part: int
    ) -> int:
        """Protect a part of a chain. Returns how many of its blocks."""
        while True:
            with self._change():
                kept = self._ledger.keep(tenant, namespace, hint, size, limits, now_s, part)
                self._restore(kept.released)
            if not kept.may_grow:
                return kept.blocks

    def end(self, namespace: NodeNamespace, name: str, keys: Iterable[BlockKey] = ()) -> HintResult:
        """End a session: its blocks are evicted first, except those that other sessions share.

        Args:
            namespace: of the session.
            name: the session.
            keys: its chain, from the head; empty: the chain that it protected.
        """
        if not self._share:
            return self._ignored()
        self._counters.add(node_metrics.HINTS["end"])
        with self._one_hint:
            chain = list(keys) or self.protected_keys(namespace, name)
            self._release(namespace, name)
            dropped = self._drop(namespace, chain)
        self._counters.add(node_metrics.HINTED_BLOCKS["dropped"], dropped)
        totals = self._totals_of(_tenant_of(namespace))
        totals.ends += 1
        totals.dropped_blocks += dropped
        return HintResult(dropped=dropped)

    def _ignored(self) -> HintResult:
        self._counters.add(node_metrics.HINTS["off"])
        return HintResult()

    def _release(self, namespace: NodeNamespace, name: str, first: int = 0) -> None:
        """End the protection of a session from a part of its chain on."""
        for part in itertools.count(first):
            with self._change():
                protected, released = self._ledger.end(namespace, name, part)
                self._restore(released)
            if not protected:
                return

    def _drop(self, namespace: NodeNamespace, keys: Sequence[BlockKey]) -> int:
        dropped = 0
        in_dram, on_volumes = ChainEnd(), ChainEnd()
        for part in reversed(parts_of(keys)):
            if in_dram.complete and on_volumes.complete:
                break
            with self._change():
                dropped += self._drop_part(namespace, part, in_dram, on_volumes)
        return dropped

    def _drop_part(self, namespace: NodeNamespace, keys: Sequence[BlockKey], in_dram: ChainEnd, on_volumes: ChainEnd) -> int:
        residency = self._residency
        held = self._held(namespace, keys)
        chain = [block.key for block in held]
        dram_children = {block.key: residency.dram_policy.children(block.key) for block in held if block.dram is not None}
        children = {block.key: residency.volume_evictor.children(block.key) for block in held if block.nvme_volume is not None}
        from_dram = in_dram.take(chain, dram_children, namespace.hinted)
        from_volumes = on_volumes.take(chain, children, namespace.hinted)
        residency.arena_evictor.demote(namespace, from_dram)
        residency.volume_evictor.demote(namespace, from_volumes)
        return len({*from_dram, *from_volumes})

    # ---- rounds
    def sweep(self) -> None:
        """End expired protections, apply smaller limits, and begin reads for turns that are expected. Called twice per second."""
        if not self._ledger:
            return
        now_s = self._clock.now_s()
        with self._residency.lock:
            over = self._ledger.over(now_s)
            accounts = [account for account in self._residency.accounts.all() if account.namespaces]
            holders = self._holders()
        for session in over:
            with self._change():
                self._restore(self._ledger.release(session))
        self._counters.add(node_metrics.HINTS_EXPIRED, sum(not session.part for session in over))
        self._trim(accounts, holders)
        with self._residency.lock:
            due = self._ledger.due(now_s, AHEAD_S) if self._last_tier is Tier.NVME else []
        for session in due:
            assert isinstance(session.namespace, NodeNamespace)
            self._read_ahead(session.namespace, self.protected_keys(session.namespace, session.name), session.tenant)

    def _trim(self, accounts: Sequence[TenantAccount], holders: Sequence[TenantAccount]) -> None:
        """Bring tenants down to their limits, and all together to the limit of all, after a limit became smaller."""
        protected = self.protected_bytes()
        of_tenant: dict[str, int] = {}
        of_all = 0
        for account in accounts:
            if account.tenant in protected:
                with self._residency.lock:
                    of_tenant[account.tenant], of_all = self._limits(account.namespaces[0], holders)
        more = bool(of_tenant)
        while more:
            with self._change():
                released = self._ledger.trim_one(of_tenant, of_all)
                more = released is not None
                self._restore(released or {})

    def _read_ahead(self, namespace: NodeNamespace, keys: Sequence[BlockKey], tenant: str) -> None:
        held: list[BlockKey] = []
        absent = False
        for part in parts_of(keys):
            with self._change():
                blocks = self._held(namespace, part)
                absent = absent or any(block.dram is None for block in blocks)
                held += (block.key for block in blocks)
        if not absent:
            return
        self._reads = {read for read in self._reads if not read.done()}
        if len(self._reads) >= MAX_WAITING_READS:
            self._counters.add(node_metrics.READ_AHEAD_REFUSED)
            return
        chain = ChainSlice(namespace.namespace_id, held)
        request = BlockRequest(namespace, chain, self._clock.now_s() + READ_S, [])
        try:
            self._reads.add(submit(self._pool, self._bring, request, tenant))
        except Unavailable as error:
            self._counters.add(node_metrics.READ_AHEAD_REFUSED)
            _log.warning("read ahead of an expected turn not begun: %s", error)
        else:
            self._counters.add(node_metrics.HINTED_READS_AHEAD)

    def _bring(self, request: BlockRequest, tenant: str) -> int:
        try:
            return self._ahead.bring(request, tenant)
        except KVStoreError as error:
            self._counters.add(node_metrics.HINTED_READS_FAILED)
            _log.warning("read ahead of an expected turn failed: %s", error)
        except Exception:  # noqa: BLE001  # thread edge: nobody waits for the result
            self._counters.add(node_metrics.HINTED_READS_FAILED)
            _log.warning("read ahead of an expected turn failed: unexpected error\n%s", traceback.format_exc())
        return 0

    # ---- state
    def protected_bytes(self) -> dict[str, int]:
        """Return the protected bytes of each tenant that has any."""
        with self._residency.lock:
            return self._ledger.bytes_by_tenant

    def totals(self) -> dict[str, TenantTotals]:
        """Return the hints of each tenant since the node started."""
        with self._residency.lock:
            return dict(self._totals)

    def _totals_of(self, tenant: str) -> TenantTotals:
        """Return a tenant's totals; beyond the limit of tenants, totals that are not kept."""
        with self._residency.lock:
            if tenant not in self._totals and len(self._totals) >= MAX_TENANTS_TOLD:
                return TenantTotals()
            return self._totals.setdefault(tenant, TenantTotals())

    def sessions(self) -> dict[str, int]:
        """Return the number of protected sessions of each tenant that has any."""
        with self._residency.lock:
            return self._ledger.sessions_by_tenant

    def protected_keys(self, namespace: NodeNamespace, name: str) -> Sequence[BlockKey]:
        """Return the keys that a session protects, from the head; none: the node does not know it."""
        with self._residency.lock:
            return self._ledger.keys_of(namespace, name)

    @contextmanager
    def _change(self) -> Iterator[None]:
        """Hold the table's lock for one part of a chain, and let other threads have it before the next part."""
        with self._residency.lock:
            before = self._ledger.displaced
            yield
            self._counters.add(node_metrics.HINTS_DISPLACED, self._ledger.displaced - before)
        time.sleep(0)

    # ---- inside the lock
    @property
    def _last_tier(self) -> Tier:
        return Tier.DRAM if self._residency.arena_evictor.is_last_tier else Tier.NVME

    def _holders(self) -> list[TenantAccount]:
        """Return tenants with blocks in the last tier: at most two, since more make no difference."""
        residency, tier = self._residency, self._last_tier
        holding = (one for one in residency.accounts.all() if held_bytes(residency, one.namespaces, tier))
        return list(itertools.islice(holding, 2))

    def _limits(self, namespace: NodeNamespace, holders: Sequence[TenantAccount]) -> Limits:
        residency, tier, account = self._residency, self._last_tier, namespace.account
        volumes = [residency.dram] if tier is Tier.DRAM else [one.volume for one in residency.node_volumes]
        capacity = sum(volume.usage().capacity_bytes for volume in volumes)
        quota = account.share.of(tier) if account is not None else None
        is_alone = account is not None and all(one is account for one in holders)
        share = max(self._share, PROTECTED_PART) if is_alone else self._share
        of_all = int(PROTECTED_PART * max(0, capacity - held_bytes(residency, residency.accounts.kept, tier)))
        return Limits(int(share * (capacity if quota is None else min(capacity, quota))), of_all)

    def _slot_bytes(self, namespace: NodeNamespace) -> int:
        return round_up(namespace.shape.block_bytes) if self._last_tier is Tier.DRAM else namespace.slot_bytes

    def _held(self, namespace: NodeNamespace, keys: Iterable[BlockKey]) -> list[Block]:
        find = self._residency.blocks.get
        return [block for key in keys if (block := find(key)) is not None and block.namespace is namespace]

    def _restore(self, released: Released) -> None:
        for namespace, keys in released.items():
            assert isinstance(namespace, NodeNamespace)
            self._residency.arena_evictor.restore(namespace, keys)
            self._residency.volume_evictor.restore(namespace, keys)


def _tenant_of(namespace: NodeNamespace) -> str:
    return namespace.account.tenant if namespace.account is not None else ""
