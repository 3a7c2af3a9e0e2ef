"""Announces and labels the chunks that the tier stores: each KV cache group has its own namespace, and is announced by itself."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, Final

from vllm.v1.kv_offload.base import Locality, Medium, OffloadingEvent

from kvclient import CacheSpec
from kvclient.engines.vllm.announcements.announcer import Announcement
from kvclient.engines.vllm.announcements.engine_events import AnnouncedGroup, EngineEvents
from kvclient.engines.vllm.announcements.engine_run import EngineRun
from kvclient.engines.vllm.announcements.messages import OWNER, engine_run
from kvclient.engines.vllm.tier.chunks import Chunk, runs_of
from kvclient.engines.vllm.tier.counters import TierCounters
from kvclient.engines.vllm.tier.facts import TierGroup
from kvclient.engines.vllm.tier.options import TierOptions
from kvclient.events.block_groups import GroupBlockId
from kvstore.core.types import KEY_BYTES, Tier

_MEDIA: Final = {Tier.DRAM: Medium.CPU, Tier.NVME: Medium.STORAGE}


class ChunkObserver:
    """Follows stored chunks until the store holds them no more. vLLM's scheduler calls all methods; only ``close`` waits.

    Args:
        options: of the tier.
        announce: whether the engine publishes KV events.
        counters: count labels and retracted announcements.
    """

    def __init__(self, options: TierOptions, *, announce: bool, counters: TierCounters) -> None:
        self._labelled = options.block_labels
        self._groups: dict[int, TierGroup] = {}
        self._storing: dict[int, list[EngineRun]] = {}
        """By job that stores."""
        self._events = EngineEvents(options.hook, announce=announce, most_blocks=options.events_blocks, count=counters.add)

    def connect(self, specs: Mapping[int, CacheSpec], groups: Mapping[int, TierGroup], engine_hash: str) -> None:
        """Follow the chunks of a weights epoch. Those of the epoch before are retracted.

        Args:
            specs: by group: its namespace.
            groups: by group.
            engine_hash: see ``engine_hash_name``.
        """
        self._storing.clear()
        self._groups = {group_id: groups[group_id] for group_id in specs}
        self._events.connect(
            [
                AnnouncedGroup([specs[group_id]], engine_hash, one.kind, one.pages, labelled=self._labelled and one.chained)
                for group_id, one in self._groups.items()
            ]
        )

    def disconnect(self) -> None:
        """Retract all chunks."""
        self._storing.clear()
        self._groups = {}
        self._events.disconnect()

    def close(self) -> None:
        """Disconnect, and wait a little for the end of the threads."""
        self._events.close()

    def planned(self, job_id: int, request: Any, chunks: Mapping[int, Sequence[Chunk]]) -> None:  # noqa: ANN401
        """Follow chunks that a job will store. ``chunks``: by group."""
        runs = self._storing[job_id] = list(self._runs(request, chunks))
        for run in runs:
            self._events.planned(run)

    def ended(self, job_id: int, held: Collection[bytes]) -> None:
        """Announce and label the chunks of a job that the store holds now. ``held``: vLLM's keys."""
        kept = frozenset(held)
        for run in self._storing.pop(job_id, ()):
            for part in _parts(run, kept):
                self._events.stored(part)

    def found(self, request: Any, chunks: Mapping[int, Sequence[Chunk]]) -> None:  # noqa: ANN401
        """Label chunks again that a job loads, in case that their labels were evicted. ``chunks``: by group."""
        if self._events.labels:
            for run in self._runs(request, chunks):
                self._events.found(run)

    def announce_again(self) -> None:
        """Announce all held chunks again: vLLM has told its subscribers to drop their state."""
        self._events.announce_again()

    def take_events(self, locality: Locality | None) -> list[OffloadingEvent]:
        """Return vLLM's events since the last call."""
        return offloading_events(self._events.take(), locality)

    def _runs(self, request: Any, chunks: Mapping[int, Sequence[Chunk]]) -> Iterator[EngineRun]:  # noqa: ANN401
        for at, (group_id, group) in enumerate(self._groups.items()):
            for run in runs_of(chunks.get(group_id, ())):
                ids = [GroupBlockId(chunk.block_hash[-KEY_BYTES:]) for chunk in run]
                keys = tuple(chunk.key for chunk in run)
                first, made = run[0].position, None
                if first is not None:
                    step = group.hashes // group.pages
                    made = engine_run(request, first, ids, group.chunk_tokens, group.hashes, step, keys=keys, group=at)
                yield made or EngineRun(0, tuple(ids), keys=keys, group=at)  # without hashes: not labelled


def _parts(run: EngineRun, held: Collection[bytes]) -> Iterator[EngineRun]:
    """Yield the consecutive chunks of a run whose keys are held."""
    for kept, indices in groupby(range(len(run.ids)), lambda at: run.keys[at] in held):
        if kept:
            part = list(indices)
            yield run.part(part[0], part[-1] + 1)


def offloading_events(announcements: Iterable[Announcement], locality: Locality | None) -> list[OffloadingEvent]:
    """Return events of announcements for vLLM's offloading, in order: it adds tokens and hashes, and publishes them.

    vLLM drops the tokens of a chunk when the last medium has lost it. So a chunk enters a medium before it leaves another one.

    Args:
        announcements: in order.
        locality: of the tier.
    """
    events: list[OffloadingEvent] = []
    for (stored, removed), same in groupby(announcements, lambda one: (one.stored, one.removed)):
        keys = [one.run.keys[one.at] for one in same]
        for bits, gone in ((stored, False), (removed, True)):
            events += [
                OffloadingEvent(list(keys), medium, gone, locality, OWNER, removal_expected=not gone)
                for tier, medium in _MEDIA.items()
                if bits & 1 << tier
            ]
    return events
