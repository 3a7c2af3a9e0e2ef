"""Answers about all metadata servers of an index, made from the answer of each. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Final

from kvproto.v1 import admin_pb2 as pb
from kvproto.v1.metadata_pb2 import GetStatsResponse

SAME_EVENT_US: Final = 5_000_000
"""Servers notice the same event within this time."""


def add_stats(answer: GetStatsResponse, others: Iterable[GetStatsResponse]) -> None:
    """Add the counters of other servers to those of the answer."""
    for other in others:
        for name, value in other.counters.items():
            answer.counters[name] += value


def add_servers(answer: pb.DescribeServerResponse, others: Iterable[pb.DescribeServerResponse], most_findings: int) -> None:
    """Add the plans and findings of other servers. A finding that several servers report is kept once."""
    known = {(one.code, one.subject) for one in answer.findings}
    for other in others:
        answer.live_plans += other.live_plans
        for one in other.findings:
            if (one.code, one.subject) not in known and len(answer.findings) < most_findings:
                known.add((one.code, one.subject))
                answer.findings.append(one)


def add_namespaces(answer: pb.DescribeNamespacesResponse, others: Iterable[pb.DescribeNamespacesResponse]) -> None:
    """Add the lookups that other servers answered."""
    found = {one.namespace_id: one for one in answer.namespaces}
    for other in others:
        for one in other.namespaces:
            if (mine := found.get(one.namespace_id)) is not None:
                mine.lookups += one.lookups
                mine.asked_blocks += one.asked_blocks
                mine.hit_blocks += one.hit_blocks


def merged_events(answers: Sequence[pb.ListClusterEventsResponse], limit: int) -> pb.ListClusterEventsResponse:
    """The events of all servers in order of time, at most ``limit``. An event that several servers noticed is kept once."""
    kept: list[pb.ClusterEvent] = []
    last: dict[tuple[str, str, str, str, str], tuple[int, int]] = {}
    events = [(event, server) for server, answer in enumerate(answers) for event in answer.events]
    for event, server in sorted(events, key=lambda pair: pair[0].id):
        what = (event.kind, event.subject, event.text, event.code, event.who)
        at, by = last.get(what, (0, server))
        if by != server and event.id - at < SAME_EVENT_US:
            continue
        last[what] = event.id, server
        kept.append(event)
    # after the end of an incomplete answer, its server may have further events: they belong to the next page
    ends = [answer.events[-1].id for answer in answers if answer.more and answer.events]
    kept = [event for event in kept if not ends or event.id <= min(ends)]
    more = len(kept) > limit or any(answer.more for answer in answers)
    return pb.ListClusterEventsResponse(events=kept[:limit], more=more)


def merged_histories(answers: Sequence[pb.DescribeHistoryResponse], step_s: int) -> pb.DescribeHistoryResponse:
    """The figures of all servers, added up. Gauges are those of the first server, because all servers share the index.

    The newest point is left out until all servers have recorded it, unless a server is more than a point behind.

    Args:
        answers: figures of each server; the first is the one that was asked.
        step_s: time between two points.
    """
    newest = [answer.at_seconds[-1] for answer in answers if answer.at_seconds]
    complete_s = min((at_s for at_s in newest if at_s >= max(newest) - step_s), default=0)
    ends = sorted({at_s for answer in answers for at_s in answer.at_seconds if at_s <= complete_s})
    position = {at_s: number for number, at_s in enumerate(ends)}
    lengths = [0] * len(ends)
    counts: dict[str, list[int]] = {}
    durations: dict[str, tuple[tuple[float, ...], list[int]]] = {}
    levels: dict[str, list[float]] = {}
    for answer in answers:
        shown = [(at, position[at_s]) for at, at_s in enumerate(answer.at_seconds) if at_s in position]
        for at, into in shown:
            lengths[into] = max(lengths[into], answer.lengths_seconds[at])
        for series in answer.counts:
            sums = counts.setdefault(series.name, [0] * len(ends))
            for at, into in shown:
                sums[into] += series.values[at]
        for timed in answer.durations:
            width = len(timed.bounds_seconds) + 1
            bounds, buckets = durations.setdefault(timed.name, (tuple(timed.bounds_seconds), [0] * (width * len(ends))))
            if bounds != tuple(timed.bounds_seconds):  # a server of another version
                continue
            for at, into in shown:
                for bucket in range(width):
                    buckets[into * width + bucket] += timed.counts[at * width + bucket]
        for level in answer.levels:
            values = levels.setdefault(level.name, [math.nan] * len(ends))
            for at, into in shown:
                if math.isnan(values[into]):
                    values[into] = level.values[at]
    return pb.DescribeHistoryResponse(
        at_seconds=ends,
        lengths_seconds=lengths,
        counts=[pb.HistoryCounts(name=name, values=counts[name]) for name in sorted(counts)],
        durations=[
            pb.HistoryDurations(name=name, bounds_seconds=durations[name][0], counts=durations[name][1])
            for name in sorted(durations)
        ],
        levels=[pb.HistoryLevels(name=name, values=levels[name]) for name in sorted(levels)],
    )
