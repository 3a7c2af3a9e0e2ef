"""Connects an engine's announcements with the store: follows its events, and writes labels. No vLLM types."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from kvclient import CacheSpec, InvalidArgument, KVClient, KVStoreError
from kvclient.engines.options import HookOptions
from kvclient.engines.vllm.announcements.announcer import Announcement, Announcer
from kvclient.engines.vllm.announcements.engine_run import EngineRun
from kvclient.events import BlockMirror, BlockWatcher, Change
from kvclient.events.block_groups import BlockGroup
from kvclient.events.label_writer import LabelWriter
from kvclient.events.labels import LabelNamespace
from kvstore.core.types import BlockKey, NamespaceId
from kvstore.observe.limited_log import LimitedLog
from kvstore.rpc.auth.tokens import TokenSource

_log = logging.getLogger(__name__)
limited = LimitedLog(_log)
_MOST_PER_STEP: Final = 4_096
"""Changes that one step of the engine announces; the others follow in later steps."""
_LABEL_CONNECT_S: Final = 3.0
_CLOSE_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class AnnouncedGroup:
    """Namespaces that hold the parts of the same blocks.

    Attributes:
        specs: the namespaces.
        engine_hash: algorithm and seed of the engine's hashes; empty: each engine computes other ones, so it writes no labels.
        kind: vLLM's kind of the KV cache group.
        hashes: the engine's hashes per block.
        labelled: whether blocks get labels.
    """

    specs: Sequence[CacheSpec]
    engine_hash: str = ""
    kind: str = ""
    hashes: int = 1
    labelled: bool = False


class EngineEvents:
    """The announcements of one engine. The scheduler's thread calls all methods; none waits for the store.

    Args:
        options: address of the store.
        announce: whether the engine publishes KV events.
        most_blocks: blocks that are followed, per group.
        count: receives counts by name.
    """

    def __init__(self, options: HookOptions, *, announce: bool, most_blocks: int, count: Callable[[str, int], None]) -> None:
        self._options = options
        self._announce = announce
        self._most_blocks = most_blocks
        self._count = count
        self._announcers: list[Announcer] = []
        self._retired: list[Announcer] = []
        self._writers: dict[int, LabelWriter] = {}
        self._watcher: BlockWatcher | None = None
        self._closing: list[Callable[[], object]] = []
        """Ends of watchers and writers that no thread has begun."""

    @property
    def labels(self) -> bool:
        """Whether any blocks get labels."""
        return bool(self._writers)

    def connect(self, groups: Sequence[AnnouncedGroup]) -> None:
        """Follow the blocks of these namespaces from now on. Blocks of earlier ones are retracted: no engine finds them.

        Args:
            groups: in the order of ``EngineRun.group``.
        """
        self._retire()
        for group, one in enumerate(groups):
            if one.labelled and not one.engine_hash:
                self._count("labels_failed", 1)
                _log.warning("blocks get no labels: vLLM seeds its hashes at random; use sha256, or set PYTHONHASHSEED")
            elif one.labelled:
                try:
                    namespace = LabelNamespace.make(one.specs, engine_hash=one.engine_hash, kind=one.kind, hashes=one.hashes)
                except InvalidArgument as error:
                    self._count("labels_failed", 1)
                    _log.warning("blocks get no labels: %s", error)
                    continue
                self._writers[group] = LabelWriter(namespace, self._connect_labels, self._count)
        if not self._announce or not self._options.metadata:
            return
        announcers = [
            Announcer(
                BlockGroup([spec.namespace for spec in one.specs]),
                self._most_blocks,
                retracted=self._on_retracted,
                unconfirmed=self._on_unconfirmed,
            )
            for one in groups
        ]
        try:
            self._watcher = BlockWatcher(
                self._options.metadata,
                namespaces=[spec.namespace for one in groups for spec in one.specs],
                tls=self._options.tls(),
                token=TokenSource.of(file=self._options.client_options().token_file),
                wanted=partial(_wanted, announcers),  # not those of a later call: this watcher may outlive it for a moment
                on_change=partial(_on_change, announcers),
            )
        except KVStoreError as error:
            _log.warning("blocks are not announced: the store's events cannot be followed (error=%s)", error)
            self._count("events_refused", 1)
            return
        self._announcers = announcers

    def _on_retracted(self, count: int) -> None:
        self._count("events_retracted", count)
        limited.warning(
            "announced blocks retracted: too many are followed (blocks=%d, events_blocks=%d)", count, self._most_blocks
        )

    def _on_unconfirmed(self, count: int) -> None:
        self._count("events_unconfirmed", count)
        limited.warning("announced blocks retracted: the store's events did not confirm them (blocks=%d)", count)

    def _connect_labels(self, namespace: LabelNamespace) -> KVClient:
        options = replace(
            self._options.client_options(),
            client_name="vllm-labels",
            require_store=False,
            connect_deadline_s=_LABEL_CONNECT_S,
        )
        return self._options.connect(namespace.spec, options)

    def planned(self, run: EngineRun) -> None:
        """Receive blocks that will be stored."""
        if run.group < len(self._announcers):
            self._announcers[run.group].expect(run)

    def stored(self, run: EngineRun) -> None:
        """Receive blocks that were stored."""
        if run.group < len(self._announcers):
            self._announcers[run.group].stored(run)
        self.found(run)

    def found(self, run: EngineRun) -> bool:
        """Receive blocks that the store holds: their labels are written again if they are old. False: they are not."""
        writer = self._writers.get(run.group) if run.hashes else None
        return writer is not None and writer.put(run)

    def announce_again(self) -> None:
        """Announce all held blocks again: vLLM has told its subscribers to drop their state."""
        for announcer in (*self._retired, *self._announcers):
            announcer.announce_again()

    def take(self) -> list[Announcement]:
        """Return the changes to announce in this step."""
        self._close_in_background()
        if self._watcher is not None:
            try:
                self._watcher.check()
            except KVStoreError as error:
                _log.warning("blocks are not announced: the store refuses its events (error=%s)", error)
                self._count("events_refused", 1)
                self._close_watcher()
        found: list[Announcement] = []
        for announcer in (*self._retired, *self._announcers):
            found += announcer.take(_MOST_PER_STEP - len(found))
        if len(found) < _MOST_PER_STEP:
            self._retired.clear()
        return found

    def disconnect(self) -> None:
        """Retract all announcements, and follow nothing until the next ``connect``."""
        self._retire()

    def close(self) -> None:
        """Disconnect, and wait a little for the end of the threads."""
        thread = self._retire()
        if thread is not None:
            thread.join(_CLOSE_S)

    def _retire(self) -> threading.Thread | None:
        """Retract all announcements, and disconnect in a thread that is returned."""
        self._close_watcher()
        writers, self._writers = self._writers, {}
        self._closing += [writer.close for writer in writers.values()]
        return self._close_in_background()

    def _close_watcher(self) -> None:
        watcher, self._watcher = self._watcher, None
        if watcher is not None:
            self._closing.append(watcher.close)
            self._close_in_background()
        for announcer in self._announcers:
            announcer.retract_all()
        self._retired += self._announcers
        self._announcers = []

    def _close_in_background(self) -> threading.Thread | None:
        """Close what was retired, in a thread that is returned. None: nothing to do, or no thread: the next step tries again."""
        if not self._closing:
            return None
        calls = tuple(self._closing)
        thread = threading.Thread(target=self._call_all, args=(calls,), name="kvstore-events-end", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            limited.warning("subscriptions and labels are not ended yet (error=%s)", error)
            return None
        self._closing.clear()
        return thread

    def _call_all(self, calls: Iterable[Callable[[], object]]) -> None:
        for call in calls:
            try:
                call()
            except Exception:  # noqa: BLE001  # the others end all the same
                self._count("bugs", 1)
                _log.exception("a subscription or labels could not be ended: unexpected error")


def _wanted(announcers: Sequence[Announcer], namespace: NamespaceId, key: BlockKey) -> bool:
    return any(announcer.wanted(namespace, key) for announcer in announcers)


def _on_change(announcers: Sequence[Announcer], mirror: BlockMirror, change: Change) -> None:
    for announcer in announcers:
        announcer.on_change(mirror, change)
