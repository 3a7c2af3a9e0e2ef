"""Placement by this router alone: ``round_robin``, or ``least_loaded``, which also stands in while the scheduler is away."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from kvstore.core.errors import Unavailable
from kvstore.observe.limited_log import LimitedLog
from kvstore.router.choice import Turn, least_loaded
from kvstore.router.config import Role
from kvstore.router.ledger import Entry
from kvstore.router.parts import Parts, Place, Wanted

_log = LimitedLog(logging.getLogger(__name__))


class LocalPlacement:
    """Chooses at once among the engines that are in.

    Args:
        parts: of the router.
        round_robin: in turn; else the least loaded.
    """

    def __init__(self, parts: Parts, *, round_robin: bool) -> None:
        self._parts = parts
        self._round_robin = round_robin
        self._turns = {role: Turn() for role in Role}

    async def place(self, wanted: Wanted) -> Place:
        return self.place_now(wanted)

    def place_now(self, wanted: Wanted) -> Place:
        """As ``place``; nothing is waited for.

        Raises:
            Unavailable: nobody is there.
        """
        if not self._parts.config.pairs:
            return self.enter(Place(wanted.attempt, self._choose(Role.PLAIN, wanted, wanted.near_tokens)), wanted)
        decode = self._choose(Role.DECODE, wanted, {})
        prefills = [name for name in self._candidates(Role.PREFILL, wanted) if name not in wanted.avoid]
        if not prefills:
            self._parts.counters.add("router_without_prefill_total")
            _log.warning("no prefill engine is there: the decode engine computes the prompt itself")
            return self.enter(Place(wanted.attempt, decode), wanted)
        return self.enter(Place(wanted.attempt, decode, self._pick(Role.PREFILL, prefills, wanted.near_tokens)), wanted)

    def enter(self, place: Place, wanted: Wanted) -> Place:
        """Books a place, whoever chose it."""
        ledger, near = self._parts.ledger, wanted.near_tokens
        room = wanted.prompt_tokens + wanted.output_tokens
        if place.prefill is None:
            ledger.begin(place.attempt, Entry(place.engine, wanted.prompt_tokens, near.get(place.engine, 0), room))
        else:
            ledger.begin(place.attempt, Entry(place.prefill, wanted.prompt_tokens, near.get(place.prefill, 0)))
            ledger.begin(place.attempt, Entry(place.engine, wanted.prompt_tokens, 0, room, decoding=True))
        return place

    def prefilled(self, place: Place) -> None:
        if place.prefill is None:
            self._parts.ledger.decodes(place.attempt, place.engine)
        else:
            self._parts.ledger.end(place.attempt, place.prefill)

    def done(self, place: Place) -> None:
        for engine in (place.engine, place.prefill):
            if engine is not None:
                self._parts.ledger.end(place.attempt, engine)

    def dropped(self, place: Place) -> None:
        self.done(place)

    def _choose(self, role: Role, wanted: Wanted, near: Mapping[str, int]) -> str:
        candidates = self._candidates(role, wanted)
        fresh = [name for name in candidates if name not in wanted.avoid]
        if not candidates:
            raise Unavailable("no engine is there", role=role, model=wanted.model or "any")
        return self._pick(role, fresh or candidates, near)

    def _candidates(self, role: Role, wanted: Wanted) -> list[str]:
        return self._parts.pool.candidates(role, self._parts.now_s(), wanted.model or None)

    def _pick(self, role: Role, candidates: list[str], near: Mapping[str, int]) -> str:
        if self._round_robin:
            return self._turns[role].next(candidates)
        return least_loaded(candidates, self._parts.load, near, self._turns[role])
