"""Search for the prefill and decode nodes, and the path policy, that serve a workload best on a given number of nodes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvstore.core.errors import InvalidArgument
from kvstore.simulate.cluster import POLICIES, SimConfig
from kvstore.simulate.result import SimResult
from kvstore.simulate.run import simulate

MOST_RATIOS = 9
CLOSE = 0.03
"""Options whose rates differ by less are equal; the one with the shorter TTFT is better."""
ORACLE = "oracle"
DEFAULT_POLICY = "split"
"""The default of ``metadata.path_policy``."""
_BUSY = 0.8
"""Share of the time that engines compute, above which they are the limit."""

Build = Callable[[int, int], SimConfig]
"""Builds the cluster with these numbers of prefill and decode nodes. Raises InvalidArgument if the model does not fit."""
OnRun = Callable[[int, int, str], None]
"""Callback with (runs done, all runs, name of the next run)."""


@dataclass(frozen=True, slots=True)
class Option:
    """One cluster with one policy, and the result of its run."""

    prefill: int
    decode: int
    policy: str
    config: SimConfig
    result: SimResult

    @property
    def name(self) -> str:
        """For example ``2P4D``."""
        return f"{self.prefill}P{self.decode}D"

    @property
    def requests_s(self) -> float:
        """Requests per second, without the tail of the longest sessions."""
        return self.result.requests_per_s

    @property
    def ttft_s(self) -> float:
        """Mean time to the first token, in seconds."""
        return self.result.ttft.mean


@dataclass(frozen=True, slots=True)
class Advice:
    """Result of a search.

    Attributes:
        best: the recommended option.
        ceiling: the same cluster with instant loads; None if the time ran out before.
        options: all that ran, the best first.
        skipped: clusters that the model does not fit, with the reason.
        left_out: runs that did not start or end in time.
    """

    best: Option
    ceiling: Option | None
    options: tuple[Option, ...]
    skipped: dict[str, str]
    left_out: int

    @property
    def reasons(self) -> list[str]:
        """Why, in sentences."""
        sentences = []
        second = next((one for one in self.options if one.name != self.best.name), None)
        if second is not None:
            sentences.append(f"{self.best.name} serves {_compared(self.best, second, f'the next best cluster, {second.name}')}")
        usual = next((one for one in self.options if one.name == self.best.name and one.policy == DEFAULT_POLICY), None)
        if usual is not None and self.best.policy != DEFAULT_POLICY:
            sentences.append(f"{self.best.policy} serves {_compared(self.best, usual, f'{DEFAULT_POLICY}, the default policy')}")
        if self.best.requests_s < max(one.requests_s for one in self.options):
            sentences.append(
                f"Rates within {CLOSE:.0%} of the highest count as equal: the shortest TTFT of these is recommended."
            )
        plain = next((one for one in self.options if one.name == self.best.name and one.policy == "prefill_only"), None)
        if plain is not None and self.best.policy != "prefill_only":
            ratio = self.best.requests_s / plain.requests_s
            sentences.append(f"{self.best.policy} serves {ratio:.2f} times the requests of prefill_only on {self.best.name}.")
        if self.ceiling is not None:
            ratio = self.ceiling.requests_s / self.best.requests_s
            if ratio > 1 + 2 * CLOSE:
                sentences.append(
                    f"With instant loads it serves {ratio:.2f} times as many requests. Wider storage links or more nodes help."
                )
            elif self.best.result.prefill_use > _BUSY:
                sentences.append("Loads cost almost nothing here: prefill engines compute all the time and are the limit.")
            else:
                sentences.append("Loads cost almost nothing here: the time that agents decode is the limit.")
        return sentences


def ratios(nodes: int) -> list[tuple[int, int]]:
    """Return (prefill, decode) nodes to try: all, or ``MOST_RATIOS`` evenly spread ones, the most even first.

    Raises:
        InvalidArgument: fewer than two nodes.
    """
    if nodes < 2:
        raise InvalidArgument("nodes must be at least 2: one prefill and one decode node", nodes=nodes)
    steps = min(MOST_RATIOS, nodes - 1)
    prefills = {round(1 + index * (nodes - 2) / max(1, steps - 1)) for index in range(steps)}
    return sorted(((prefill, nodes - prefill) for prefill in prefills), key=lambda pair: (abs(pair[0] - pair[1]), pair))


class _OutOfTime(Exception):
    """The time of the search is over."""


def advise(
    build: Build,
    pairs: Sequence[tuple[int, int]],
    policies: Sequence[str],
    *,
    limit_s: float = 20.0,
    on_run: OnRun | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Advice:
    """Simulate clusters with policies, and recommend one.

    Args:
        build: makes the configuration of a cluster, with its sessions.
        pairs: (prefill, decode) nodes, in the order in which they are tried.
        policies: to compare.
        limit_s: the search ends after this time with the options that ran; the first run always ends.
        on_run: called before each run, and at the end without a name.
        clock: seconds.

    Raises:
        InvalidArgument: the model fits none of the clusters.
    """
    end = clock() + limit_s
    options: list[Option] = []
    skipped: dict[str, str] = {}
    total, done = len(pairs) * len(policies) + 1, 0

    def run(pair: tuple[int, int], policy: str, config: SimConfig) -> Option:
        if on_run is not None:
            on_run(done, total, f"{pair[0]}P{pair[1]}D {policy}")

        def check(finished: int, of: int) -> None:
            if options and finished < of and clock() > end:
                raise _OutOfTime

        config = config.but(variant=POLICIES[policy])
        return Option(*pair, policy, config, simulate(config, check))

    ceiling = None
    try:
        for pair in pairs:
            try:
                config = build(*pair)
            except InvalidArgument as error:
                skipped[f"{pair[0]}P{pair[1]}D"] = str(error)
                done += len(policies)
                continue
            for policy in policies:
                if options and clock() > end:
                    raise _OutOfTime  # noqa: TRY301  # as from within a run
                options.append(run(pair, policy, config))
                done += 1
        if options and clock() <= end:
            best = _best(options)
            ceiling = run((best.prefill, best.decode), ORACLE, best.config)
            done += 1
    except _OutOfTime:
        pass
    if not options:
        reason = next(iter(skipped.values()), "no cluster was given")
        raise InvalidArgument(f"the model fits none of the clusters: {reason}")
    if on_run is not None:
        on_run(total, total, "")
    best = _best(options)
    ordered = [best, *sorted((one for one in options if one is not best), key=lambda one: -one.requests_s)]
    return Advice(best, ceiling, tuple(ordered), skipped, total - done)


def _best(options: Sequence[Option]) -> Option:
    """The shortest TTFT among those with about the highest rate."""
    most = max(option.requests_s for option in options)
    return min((option for option in options if option.requests_s >= most * (1 - CLOSE)), key=lambda option: option.ttft_s)


def _compared(best: Option, other: Option, name: str) -> str:
    """The end of a sentence that compares two options."""
    ratio = best.requests_s / other.requests_s
    return f"{ratio:.2f} times the requests of {name} (TTFT: {best.ttft_s:.3f} s and {other.ttft_s:.3f} s)."
