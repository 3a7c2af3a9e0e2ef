"""Who computes a request: by the scheduler's rules, asked directly or through the metadata server, or in turns."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from kvstore.dualpath.groups import Engine, Role
from kvstore.dualpath.scheduler import Ask, Pair, Scheduler
from netlab.engine_bed import EngineBed


class Assigned(NamedTuple):
    """A request has both engines; ``generation`` names the attempt where the metadata server found them."""

    name: str
    prefill: str
    decode: str
    generation: int = 0


@dataclass(frozen=True, slots=True)
class Wanted:
    """A request: its name, tokens of its prompt, those that hit, and those to generate."""

    name: str
    prompt: int
    hit: int
    out: int


class Assigner(Protocol):
    """Told what happens to requests; each answers with what has both engines for that, at once."""

    def submit(self, wanted: Wanted) -> list[Assigned]:
        """A new request."""

    def prefilled(self, name: str) -> list[Assigned]:
        """Its prompt is computed and handed over."""

    def finished(self, name: str) -> list[Assigned]:
        """It is done."""


class InTurns:
    """Engines in turns, whatever their load."""

    def __init__(self, bed: EngineBed) -> None:
        self._prefill, self._decode = itertools.cycle(bed.bed.prefill_hosts), itertools.cycle(bed.bed.decode_hosts)

    def submit(self, wanted: Wanted) -> list[Assigned]:
        return [Assigned(wanted.name, next(self._prefill), next(self._decode))]

    def prefilled(self, name: str) -> list[Assigned]:  # noqa: ARG002  # turns need no news
        return []

    def finished(self, name: str) -> list[Assigned]:  # noqa: ARG002
        return []


class ByRules:
    """The paper's scheduler, held by the coordinator itself: it answers at once, and no message is in the way."""

    def __init__(self, bed: EngineBed) -> None:
        self._token_bytes = bed.engine.token_bytes
        self._generations: dict[str, int] = {}
        self._groups: list[str] = []
        self._scheduler = Scheduler(bed.limits)
        for role, names in ((Role.PREFILL, bed.bed.prefill_hosts), (Role.DECODE, bed.bed.decode_hosts)):
            room = int(bed.engine.kv_room_bytes) if role is Role.DECODE else 0
            for name in names:
                self._scheduler.join(Engine(name, role, group=name, node=name, hbm_bytes=room))
                self._groups.append(name)

    def submit(self, wanted: Wanted) -> list[Assigned]:
        room = int((wanted.prompt + wanted.out) * self._token_bytes)
        self._scheduler.submit(Ask(wanted.name, wanted.prompt, room))
        return self._fetch()

    def prefilled(self, name: str) -> list[Assigned]:
        self._scheduler.prefill_done(name, self._generations[name])
        return self._fetch()

    def finished(self, name: str) -> list[Assigned]:
        self._scheduler.finish(name, self._generations[name])
        return self._fetch()

    def _fetch(self) -> list[Assigned]:
        pairs: list[Pair] = []
        for group in self._groups:
            pairs += self._scheduler.fetch(group).pairs
        self._generations.update((pair.request_id, pair.generation) for pair in pairs)
        return [Assigned(pair.request_id, pair.prefill.engine, pair.decode.engine) for pair in pairs]


class ByServer:
    """The metadata server's scheduler: a router on the bed asks it, engines' leaders report to it; answers come as events."""

    def __init__(self, bed: EngineBed) -> None:
        self._bed = bed

    def submit(self, wanted: Wanted) -> list[Assigned]:
        self._bed.router.tell(do="assign", id=wanted.name, prompt=wanted.prompt, hit=wanted.hit, out=wanted.out)
        return []

    def prefilled(self, name: str) -> list[Assigned]:  # noqa: ARG002  # the engine's leader has said it
        return []

    def finished(self, name: str) -> list[Assigned]:  # noqa: ARG002
        return []
