"""The weights epoch of one engine as a state machine. Pure: events in, decisions out.

An epoch is the name of the weights in the namespaces of the store. The engine reports no change of its weights, only resets of
its cache. The workers digest the weights when they are asked.

1. ``OPEN``: the KV that the engine holds was computed by the weights of the epoch. Blocks are loaded and stored.
2. A reset that succeeds leads to ``CHECKING``. The engine holds no KV now. vLLM resets its cache before it changes the weights
   (a pause) or afterwards, so they are digested as late as possible: with the first step that computes, or for which a request
   waits. Until the workers have answered, requests wait, and nothing is stored.
3. A reset that fails leads to ``DOUBTED``: the weights may have changed, and the engine still holds KV of those before. They are
   digested in the same way. Equal weights lead back to ``OPEN``.
4. Other weights, no answer in time, or a failed reset whose caller demands that earlier KV is not found, lead to ``CLOSED``: the
   engine may hold KV of several weights. So does an epoch that could not begin. Nothing is loaded or stored until a reset
   succeeds.

A name belongs to the digest that used it first, so a name never means two states of the weights. If earlier weights return, they
get their earlier name. Weights whose name is not known get a name that no other engine has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import Enum, auto

_MOST_NAMES = 65_536
"""Names of the user that are remembered. Later ones are not used."""


class EpochPhase(Enum):
    """State of an epoch; see the docstring of the module."""

    OPEN = auto()
    CHECKING = auto()
    DOUBTED = auto()
    CLOSED = auto()


class EpochEvent(Enum):
    """An observation of the engine."""

    CLEARED = auto()
    """The engine reset its cache: it holds no KV."""
    KEPT = auto()
    """A reset failed: the engine kept its cache."""
    RENEWED = auto()
    """The caller of the reset demands that earlier KV is not found."""
    SAME = auto()
    """The weights are those of the epoch."""
    OTHER = auto()
    """The weights are not those of the epoch."""
    UNKNOWN = auto()
    """Not all workers have answered in time."""
    FAILED = auto()
    """The epoch could not begin, e.g. since no client could be made."""


TRANSITIONS: Mapping[tuple[EpochPhase, EpochEvent], EpochPhase] = {
    (EpochPhase.OPEN, EpochEvent.CLEARED): EpochPhase.CHECKING,
    (EpochPhase.OPEN, EpochEvent.KEPT): EpochPhase.DOUBTED,
    (EpochPhase.OPEN, EpochEvent.RENEWED): EpochPhase.CLOSED,
    (EpochPhase.CHECKING, EpochEvent.CLEARED): EpochPhase.CHECKING,
    (EpochPhase.CHECKING, EpochEvent.KEPT): EpochPhase.CLOSED,
    (EpochPhase.CHECKING, EpochEvent.RENEWED): EpochPhase.CHECKING,
    (EpochPhase.CHECKING, EpochEvent.SAME): EpochPhase.OPEN,
    (EpochPhase.CHECKING, EpochEvent.OTHER): EpochPhase.OPEN,
    (EpochPhase.CHECKING, EpochEvent.UNKNOWN): EpochPhase.OPEN,
    (EpochPhase.DOUBTED, EpochEvent.CLEARED): EpochPhase.CHECKING,
    (EpochPhase.DOUBTED, EpochEvent.KEPT): EpochPhase.DOUBTED,
    (EpochPhase.DOUBTED, EpochEvent.RENEWED): EpochPhase.CLOSED,
    (EpochPhase.DOUBTED, EpochEvent.SAME): EpochPhase.OPEN,
    (EpochPhase.DOUBTED, EpochEvent.OTHER): EpochPhase.CLOSED,
    (EpochPhase.DOUBTED, EpochEvent.UNKNOWN): EpochPhase.CLOSED,
    (EpochPhase.CLOSED, EpochEvent.CLEARED): EpochPhase.CHECKING,
    (EpochPhase.CLOSED, EpochEvent.KEPT): EpochPhase.CLOSED,
    (EpochPhase.CLOSED, EpochEvent.RENEWED): EpochPhase.CLOSED,
    **{(phase, EpochEvent.FAILED): EpochPhase.CLOSED for phase in EpochPhase},
}


class EpochDecision(Enum):
    """Action that follows from an event."""

    NOTHING = auto()
    ASK = auto()
    """The workers are asked for digests of their weights."""
    BEGIN = auto()
    """An epoch begins: ``name`` and ``number`` are new. Earlier KV is not found."""
    CLOSE = auto()
    """Nothing is loaded or stored from now on."""


class EpochMachine:
    """See the docstring of the module.

    Args:
        name: of the first epoch.
        digest: of its weights.
        named: whether the user gave that name.
        unique: makes a name that no other engine has.
    """

    def __init__(self, name: str, digest: str, *, named: bool, unique: Callable[[], str]) -> None:
        self.phase = EpochPhase.OPEN
        self.name = name
        self.number = 0
        """Increases with each epoch."""
        self._digest = digest
        """Of the weights of the epoch; empty: unknown."""
        self._bound = {name: digest} if named else {}
        """By name of the user: the digest that it belongs to; empty: it was used for unknown weights."""
        self._unique = unique
        self._renewed = False
        """The user's name counts again, even if the weights are the same."""

    def cleared(self) -> EpochDecision:
        """Handle a reset of the engine's cache that succeeded."""
        self._move(EpochEvent.CLEARED)
        return EpochDecision.ASK

    def kept(self) -> EpochDecision:
        """Handle a reset that failed, so that the engine kept its cache."""
        before = self.phase
        if self._move(EpochEvent.KEPT) is EpochPhase.DOUBTED:
            return EpochDecision.ASK
        return EpochDecision.NOTHING if before is EpochPhase.CLOSED else EpochDecision.CLOSE

    def renewed(self) -> EpochDecision:
        """Handle a reset whose caller demands that earlier KV is not found, after ``cleared`` or ``kept``."""
        before, self._renewed = self.phase, True
        closes = self._move(EpochEvent.RENEWED) is EpochPhase.CLOSED and before is not EpochPhase.CLOSED
        return EpochDecision.CLOSE if closes else EpochDecision.NOTHING

    def failed(self) -> EpochDecision:
        """Handle that the epoch could not begin. The check after the next reset begins another one, whatever the weights are."""
        self._move(EpochEvent.FAILED)
        self.name = self._digest = ""
        return EpochDecision.CLOSE

    def checked(self, digest: str, given: str | None, *, latest: bool) -> EpochDecision:
        """Handle the end of a check.

        Args:
            digest: of the weights; empty: not all workers have answered in time.
            given: the name that the user gives to the weights now; empty: none; None: it cannot be read.
            latest: no other check was begun after this one.
        """
        if self.phase in {EpochPhase.OPEN, EpochPhase.CLOSED} or (self.phase is EpochPhase.CHECKING and not latest):
            return EpochDecision.NOTHING
        same = bool(digest) and digest == self._digest
        if same and not latest:  # the later check must say so too
            return EpochDecision.NOTHING
        event = EpochEvent.SAME if same else EpochEvent.OTHER if digest else EpochEvent.UNKNOWN
        before = self.phase
        if self._move(event) is EpochPhase.CLOSED:
            return EpochDecision.CLOSE
        if before is EpochPhase.DOUBTED:
            return EpochDecision.NOTHING
        name = self._name(digest, given, same=same)
        self._renewed = False
        self._digest = digest
        if name == self.name:
            return EpochDecision.NOTHING
        self.name = name
        self.number += 1
        return EpochDecision.BEGIN

    def _move(self, event: EpochEvent) -> EpochPhase:
        self.phase = TRANSITIONS[self.phase, event]
        return self.phase

    def _name(self, digest: str, given: str | None, *, same: bool) -> str:
        """Choose the name of weights that the engine's next KV is computed by."""
        if same and (given == "" or not self._renewed):
            return self.name
        if given is None:
            return self._unique()
        if not given:
            return digest or self._unique()
        if given not in self._bound and len(self._bound) < _MOST_NAMES:
            self._bound[given] = digest
            return given
        if digest and self._bound.get(given) == digest:
            return given
        return self.name if same else self._unique()
