"""The name of the weights that the engine's KV belongs to: ``EpochMachine`` with the checks and the names that feed it.

The first epoch has the name that the user gives (``weights_epoch``, or the content of ``weights_epoch_file``), or a digest of the
weights. A later one has the name in the file, or the digest of the weights, or a name that no other engine has.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

from kvclient import InvalidArgument
from kvclient.engines.options import HookOptions
from kvclient.engines.vllm.identity.epoch_machine import EpochDecision, EpochMachine, EpochPhase
from kvclient.engines.vllm.identity.weights_check import WeightsCheck

_log = logging.getLogger(__name__)
_MAX_BYTES = 256
_READ_S = 1.0
"""Time for reading the name while the engine runs. A network file system may hang."""


class EpochOptions(Protocol):
    """The options that name epochs."""

    @property
    def hook(self) -> HookOptions:
        """Options common to all hooks."""

    @property
    def weights_epoch_file(self) -> str:
        """A file that names the epoch; empty: none."""


def is_named(options: EpochOptions) -> bool:
    """Whether the user names the epochs."""
    return bool(options.weights_epoch_file or options.hook.weights_epoch)


def given_name(options: EpochOptions) -> str:
    """Return the name that the user gives to the weights now; empty: none.

    Raises:
        InvalidArgument: the file is missing, or contains no name.
    """
    return _read(Path(options.weights_epoch_file)) if options.weights_epoch_file else options.hook.weights_epoch


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            name = file.read(_MAX_BYTES + 1).decode().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgument("weights_epoch_file is not readable", file=str(path), error=error) from error
    if not name or len(name) > _MAX_BYTES:
        raise InvalidArgument("weights_epoch_file contains no name of at most 256 bytes", file=str(path), bytes=len(name))
    return name


class WeightsEpoch:
    """The weights epoch of one engine. Called by the scheduler's one thread.

    Args:
        options: name the epochs.
        workers: how many workers answer a check.
        count: receives the names of counters.
        clock: the time in seconds.
    """

    def __init__(
        self,
        options: EpochOptions,
        workers: int = 1,
        count: Callable[[str], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._options = options
        self._count = count
        self._check = WeightsCheck(workers, clock)
        self._reader: threading.Thread | None = None
        """Reads the name, and may hang."""
        self._machine = self._begin(options.hook.weights_epoch, "")

    def start(self, name: str, digest: str) -> None:
        """Receive what the workers hold at the start.

        Args:
            name: of the first epoch.
            digest: of the weights of this engine's workers.
        """
        self._machine = self._begin(name, digest)

    def _begin(self, name: str, digest: str) -> EpochMachine:
        return EpochMachine(name, digest, named=is_named(self._options), unique=self._unique)

    def _unique(self) -> str:
        _log.warning("the weights have no name that other engines know: their KV is not shared until the next reset")
        return f"{self._options.hook.weights_epoch}~{uuid.uuid4().hex}"

    @property
    def name(self) -> str:
        """Name of the current epoch."""
        return self._machine.name

    @property
    def number(self) -> int:
        """Number of the current epoch."""
        return self._machine.number

    @property
    def is_open(self) -> bool:
        """Whether blocks that a step computes may be stored."""
        return self._machine.phase is EpochPhase.OPEN

    @property
    def is_closed(self) -> bool:
        """Whether nothing is loaded or stored until a reset succeeds."""
        return self._machine.phase is EpochPhase.CLOSED

    # ---- resets ----
    def reset_ended(self, *, cleared: bool) -> EpochDecision:
        """Handle a reset of the engine's cache, before ``renew``; ``cleared``: it succeeded."""
        return self._applied(self._machine.cleared() if cleared else self._machine.kept())

    def renew(self) -> EpochDecision:
        """Handle the demand that earlier KV is not found, if the weights have changed or will have before the next step."""
        self._count("resets")
        return self._applied(self._machine.renewed())

    def begin_failed(self) -> EpochDecision:
        """Handle that the epoch that ``end_checks`` began could not begin."""
        return self._applied(self._machine.failed())

    # ---- checks ----
    def hold_back(self) -> bool:
        """Whether a request must wait for a check of the weights. If so, the step of this request makes it.

        Else it may be loaded if ``is_open``.
        """
        return self._check.hold_back()

    def plan_check(self, *, computes: bool) -> int:
        """Return the number of the check that the workers make before a step; 0: none. ``computes``: the step computes tokens."""
        return self._check.plan(computes=computes)

    def answered(self, digests: Mapping[tuple[int, int], str]) -> None:
        """Record digests of the workers, by number of the check and rank."""
        self._check.answered(digests)

    def end_checks(self) -> EpochDecision:
        """Apply the results of checks that have ended. Called once per step."""
        for number, digest in self._check.take():
            if not digest:
                self._count("weights_checks_late")
                _log.error("check of the weights not answered in time by all workers (check=%d)", number)
            decision = self._machine.checked(digest, self._given(), latest=number == self._check.number)
            if decision is not EpochDecision.NOTHING:
                return self._applied(decision)
        return EpochDecision.NOTHING

    def _given(self) -> str | None:
        """Read the name in a thread, since the file system may hang. None: not readable."""
        found: list[str] = []

        def read() -> None:
            try:
                found.append(given_name(self._options))
            except InvalidArgument as error:
                _log.error("name of the weights not readable (error=%s)", error)

        if self._reader is None or not self._reader.is_alive():
            self._reader = threading.Thread(target=read, name="kvstore-weights-name", daemon=True)
            try:
                self._reader.start()
            except RuntimeError as error:  # no more threads
                _log.error("name of the weights not read (error=%s)", error)
                self._reader = None
                return None
            self._reader.join(_READ_S)
        if self._reader.is_alive():
            _log.error("name of the weights not read: the file system hangs (file=%s)", self._options.weights_epoch_file)
            return None
        return found[0] if found else None

    def _applied(self, decision: EpochDecision) -> EpochDecision:
        if decision is EpochDecision.ASK:
            self._check.begin()
        elif decision is EpochDecision.CLOSE:
            self._check.abandon()
            self._count("epochs_closed")
            _log.error("nothing is loaded or stored until a reset of the cache succeeds: the engine may hold KV of other weights")
        elif decision is EpochDecision.BEGIN:
            self._count("weights_epochs")
            _log.info("weights epoch began: %r (number=%d)", self.name, self.number)
        return decision
