"""Measure hints about sessions: hit ratio of a cache that is half as large as its working set, with and without them.

Recorded agent sessions (``weka_agentic_64k``), a random part of them per round, are replayed over the node's eviction policy and
its ledger of hints. The working set is the mean, over all requests, of the blocks of sessions that still have a turn ahead. After
each turn an agent says when it expects its next one, exactly or with an error (log-normal, sigma 0.7), and at its end that it has
ended. The peer is the same policy without hints. The limit is Belady's MIN, which knows all requests.

The second figure has a cheating tenant: half of the sessions belong to a tenant that marks everything as urgent, of the highest
priority, for an hour, and ends nothing. It is the hit ratio of the other tenant, which gives hints as above. The peer is that
tenant's hit ratio without any hints. A third one is the cheater's own hit ratio. There each tenant may protect 0.45 of
the cache: half of the part that all tenants together may protect.

``--shares`` measures instead how the first two figures depend on the share that one tenant may protect (``node.hint_share``;
default 0.5).
"""

from __future__ import annotations

import argparse
import itertools
import math
import random
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

from harness import REPOSITORY, Figure, Options, Reference, Target, options
from kvstore.core.types import BlockKey
from kvstore.node.hints.ledger import ChainEnd, HintLedger, Limits, Released, SessionHint
from kvstore.tiers.eviction.policy import make_policy
from kvstore.workload.bounds import ChainIds, best_hits
from kvstore.workload.chains import ChainTable
from kvstore.workload.traces import open_trace

TRACE = "weka_agentic_64k.rle.jsonl.zst"
KEEP_S = 3_600.0
ERROR_SIGMA = 0.7
SHARE_ALONE, SHARE_OF_TWO = 0.9, 0.45
SHARES = (0.5, 0.7, 0.9)
ALL_TENANTS = 0.9
Knowledge = Literal["none", "estimated", "exact"]


class Namespace:
    """A tenant's namespace as the ledger needs it."""

    def __init__(self, tenant: str) -> None:
        self.tenant = tenant
        self.hinted: dict[BlockKey, int] = {}


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of the replay."""

    session: str
    at_s: float
    chain: ChainIds
    next_s: float | None
    """Time until the session's next turn; None: it has ended."""


def read_turns(trace: Path, sessions: int, seed: int) -> list[Turn]:
    """Read the requests of a random part of the sessions."""
    requests = list(open_trace(trace))
    names = sorted({request.session for request in requests})
    chosen = set(random.Random(seed).sample(names, min(sessions, len(names))))
    requests = [request for request in requests if request.session in chosen]
    table = ChainTable()
    following: dict[str, int] = {}
    turns: list[Turn] = []
    chains = [table.intern(request.session, request.block_ids) for request in requests]
    for request, chain in zip(reversed(requests), reversed(chains), strict=True):
        after_ms = following.get(request.session)
        following[request.session] = request.timestamp_ms
        next_s = None if after_ms is None else (after_ms - request.timestamp_ms) / 1000
        turns.append(Turn(request.session, request.timestamp_ms / 1000, chain, next_s))
    return turns[::-1]


def working_set(turns: Sequence[Turn]) -> int:
    """Mean number of blocks of sessions with a turn ahead."""
    held: dict[str, set[int]] = {}
    uses: Counter[int] = Counter()
    sizes = []
    for turn in turns:
        mine = held.setdefault(turn.session, set())
        fresh = set(turn.chain.tolist()) - mine
        uses.update(fresh)
        mine |= fresh
        sizes.append(len(uses))
        if turn.next_s is None:
            for block in held.pop(turn.session):
                uses[block] -= 1
                if not uses[block]:
                    del uses[block]
    return int(statistics.mean(sizes))


class Replay:
    """One cache, in blocks, with one eviction policy and a ledger.

    Args:
        policy: its name.
        capacity: blocks.
        share: fraction of it that one tenant may protect.
        hint: the hint of a tenant after a turn; None: it gives none.
    """

    def __init__(
        self, policy: str, capacity: int, share: float, hint: Callable[[Turn, str, Sequence[BlockKey]], SessionHint | None] | None
    ) -> None:
        self._policy = make_policy(policy)
        self._capacity = capacity
        self._limits = Limits(int(share * capacity), int(ALL_TENANTS * capacity))
        self._hint = hint
        self._ledger = HintLedger()
        self._held: dict[BlockKey, Namespace] = {}
        self._namespaces: dict[str, Namespace] = {}
        self.blocks: Counter[str] = Counter()
        self.hits: Counter[str] = Counter()

    def ratio(self, tenant: str) -> float:
        """Return a tenant's hit ratio."""
        return self.hits[tenant] / self.blocks[tenant]

    def serve(self, turn: Turn, tenant: str) -> None:
        """Load and store the blocks of a request, and give its hint."""
        namespace = self._namespaces.setdefault(tenant, Namespace(tenant))
        marked = [number << 1 | (tenant == "cheater") for number in turn.chain.tolist()]
        keys = [BlockKey(number.to_bytes(16, "big")) for number in marked]
        hit = next((position for position, key in enumerate(keys) if key not in self._held), len(keys))
        self.blocks[tenant] += len(keys)
        self.hits[tenant] += hit
        self._policy.touch(keys[:hit])
        self._store(namespace, keys, hit)
        if self._hint is None:
            return
        for session in self._ledger.over(turn.at_s):
            self._restore(self._ledger.release(session))
        hint = self._hint(turn, tenant, keys)
        if hint is not None:
            more = True
            while more:
                _, released, more = self._ledger.keep(tenant, namespace, hint, 1, self._limits, turn.at_s)
                self._restore(released)
        else:
            self._restore(self._ledger.end(namespace, turn.session)[1])
            children = {key: self._policy.children(key) for key in keys if key in self._held}
            self._policy.demote(ChainEnd().take(keys, children, namespace.hinted))

    def _store(self, namespace: Namespace, keys: Sequence[BlockKey], hit: int) -> None:
        own, new, held = frozenset(keys), keys[hit:], self._held
        short = len(held) + len(new) - self._capacity
        if short > 0:
            coldest = self._policy.coldest(lambda key: None if key in held[key].hinted else key not in own)
            for key in list(itertools.islice(coldest, short)):
                self._policy.remove(key)
                del held[key]
        for position, key in enumerate(new[: self._capacity - len(held)], start=hit):
            self._policy.insert(key, keys[position - 1] if position else None)
            held[key] = namespace

    def _restore(self, released: Released) -> None:
        for keys in released.values():
            self._policy.restore(keys)


def honest(knowledge: Knowledge, seed: int) -> Callable[[Turn, str, Sequence[BlockKey]], SessionHint | None]:
    """Return the hints of an agent that says what it knows."""
    draw = random.Random(seed)

    def hint(turn: Turn, _tenant: str, keys: Sequence[BlockKey]) -> SessionHint | None:
        if turn.next_s is None:
            return None
        error = math.exp(draw.gauss(0.0, ERROR_SIGMA)) if knowledge == "estimated" else 1.0
        return SessionHint(turn.session, keys, KEEP_S, turn.next_s * error)

    return hint


def run(
    turns: Sequence[Turn],
    policy: str,
    capacity: int,
    knowledge: Knowledge,
    seed: int,
    *,
    cheater: bool = False,
    share: float | None = None,
) -> dict[str, float]:
    """Replay all turns once. Returns the hit ratio of each tenant. ``share``: None: depends on the number of tenants."""
    fair = honest(knowledge, seed)

    def hint(turn: Turn, tenant: str, keys: Sequence[BlockKey]) -> SessionHint | None:
        return SessionHint(turn.session, keys, KEEP_S, 1.0, 9) if tenant == "cheater" else fair(turn, tenant, keys)

    tenants = sorted({turn.session for turn in turns})
    draw = random.Random(seed)
    cheating = set(draw.sample(tenants, len(tenants) // 2)) if cheater else set()
    if share is None:
        share = SHARE_OF_TWO if cheater else SHARE_ALONE
    replay = Replay(policy, capacity, share, None if knowledge == "none" else hint)
    for turn in turns:
        replay.serve(turn, "cheater" if turn.session in cheating else "honest")
    return {tenant: replay.ratio(tenant) for tenant in replay.blocks}


def measure(opts: Options, trace: Path) -> None:
    """Measure all figures, one part of the sessions per round."""
    sessions = opts.pick(full=60, quick=40, smoke=8)
    ratios: dict[tuple[str, Knowledge], list[float]] = {}
    best: list[float] = []
    cheated: dict[tuple[str, Knowledge, str], list[float]] = {}
    capacities = []
    for number in range(opts.repetitions):
        seed = opts.seed + number
        turns = read_turns(trace, sessions, seed)
        capacity = working_set(turns) // 2
        capacities.append(capacity)
        best.append(best_hits([turn.chain for turn in turns], capacity).ratio)
        for policy in ("reuse-distance", "lru"):
            for knowledge in cast("tuple[Knowledge, ...]", ("none", "estimated", "exact")):
                found = run(turns, policy, capacity, knowledge, seed)
                ratios.setdefault((policy, knowledge), []).append(found["honest"])
                if knowledge != "exact":
                    for tenant, ratio in run(turns, policy, capacity, knowledge, seed, cheater=True).items():
                        cheated.setdefault((policy, knowledge, tenant), []).append(ratio)
    size = {"sessions": sessions, "cache": 0.5}
    notes = f"capacity {int(statistics.median(capacities))} blocks; replay of the node's policy and ledger, no bytes move"
    for policy in ("reuse-distance", "lru"):
        for knowledge in cast("tuple[Knowledge, ...]", ("exact", "estimated")):
            opts.keep(
                Figure("hints_hit_ratio", "Hit ratio with hints", {"policy": policy, "next_turn": knowledge, **size}, "share"),
                ratios[policy, knowledge],
                limit=Reference("Belady's MIN", best),
                peer=Reference("no hints", ratios[policy, "none"]),
                target=Target("peer", 1.15),
                notes=notes,
            )
        for tenant in ("honest", "cheater"):
            opts.keep(
                Figure("hints_cheater", f"Hit ratio beside a cheater: {tenant} tenant", {"policy": policy, **size}, "share")
                if tenant == "honest"
                else Figure("hints_cheater_own", "Hit ratio of the cheater", {"policy": policy, **size}, "share"),
                cheated[policy, "estimated", tenant],
                peer=Reference("no hints", cheated[policy, "none", tenant]),
                notes=notes,
            )


def measure_shares(opts: Options, trace: Path) -> None:
    """Measure the figures per share."""
    sessions = opts.pick(full=40, quick=30, smoke=8)
    alone: dict[tuple[str, float], list[float]] = {}
    beside: dict[tuple[str, float], list[float]] = {}
    for number in range(opts.repetitions):
        seed = opts.seed + number
        turns = read_turns(trace, sessions, seed)
        capacity = working_set(turns) // 2
        for policy in ("reuse-distance", "lru"):
            none = run(turns, policy, capacity, "none", seed)["honest"]
            none_beside = run(turns, policy, capacity, "none", seed, cheater=True)["honest"]
            alone.setdefault((policy, 0.0), []).append(none)
            beside.setdefault((policy, 0.0), []).append(none_beside)
            for share in SHARES:
                found = run(turns, policy, capacity, "exact", seed, share=share)
                alone.setdefault((policy, share), []).append(found["honest"])
                found = run(turns, policy, capacity, "estimated", seed, cheater=True, share=share)
                beside.setdefault((policy, share), []).append(found["honest"])
    for policy in ("reuse-distance", "lru"):
        for share in SHARES:
            size: dict[str, str | int | float | bool] = {"policy": policy, "share": share, "sessions": sessions, "cache": 0.5}
            for name, title, ratios in (
                ("hints_share_alone", "Hit ratio with hints by share: one tenant", alone),
                ("hints_share_cheater", "Hit ratio with hints by share: beside a cheater", beside),
            ):
                opts.keep(
                    Figure(name, title, size, "share"), ratios[policy, share], peer=Reference("no hints", ratios[policy, 0.0])
                )


def _add_traces(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--traces",
        type=Path,
        default=REPOSITORY.parent / "shared" / "traces",
        help="folder of recorded traces (default ../shared/traces)",
    )
    parser.add_argument("--shares", action="store_true", help="measure the figures per share that one tenant may protect")


def main() -> None:
    """Measure, unless the trace is missing."""
    opts = options("hints", __doc__, arguments=_add_traces)
    trace = opts.extra.traces / TRACE
    if not trace.is_file():
        print(f"skipped: no trace at {trace}", flush=True)
        return
    (measure_shares if opts.extra.shares else measure)(opts, trace)


if __name__ == "__main__":
    main()
