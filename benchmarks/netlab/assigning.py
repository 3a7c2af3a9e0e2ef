"""Assignment of engines to requests: by the scheduler's rules, called directly or through the metadata server, or round robin."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from kvstore.core.errors import Internal
from kvstore.dualpath.groups import Engine, EngineKind
from kvstore.dualpath.scheduler import NewRequest, PairedRequest, Scheduler
from netlab.engine_bed import EngineBed


class Assigned(NamedTuple):
    """A request has both engines; ``generation`` names the attempt in which the metadata server found them."""

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
        """Submit a new request."""

    def prefilled(self, name: str) -> list[Assigned]:
        """Its prompt is computed and handed over."""

    def finished(self, name: str) -> list[Assigned]:
        """Record that a request is done."""

    def assigned(self, event: dict[str, Any]) -> Assigned:
        """An answer that came later."""


class InTurns:
    """Engines in turns, independent of their load."""

    def __init__(self, bed: EngineBed) -> None:
        self._prefill, self._decode = itertools.cycle(bed.bed.prefill_hosts), itertools.cycle(bed.bed.decode_hosts)

    def assigned(self, event: dict[str, Any]) -> Assigned:
        raise Internal("no answer is pending: this assignment is synchronous", got=event["id"])

    def submit(self, wanted: Wanted) -> list[Assigned]:
        return [Assigned(wanted.name, next(self._prefill), next(self._decode))]

    def prefilled(self, name: str) -> list[Assigned]:  # noqa: ARG002  # turns need no news
        return []

    def finished(self, name: str) -> list[Assigned]:  # noqa: ARG002
        return []


class ByRules:
    """The paper's scheduler, held by the coordinator itself: it answers at once, and no message is in the way.

    All engines of a role are one group: one that fetches alone would take whatever waits, and leave nothing to others.
    """

    def __init__(self, bed: EngineBed) -> None:
        self._token_bytes = bed.engine.token_bytes
        self._generations: dict[str, int] = {}
        self._scheduler = Scheduler(bed.limits)
        for role, names in ((EngineKind.PREFILL, bed.bed.prefill_hosts), (EngineKind.DECODE, bed.bed.decode_hosts)):
            space = int(bed.engine.kv_space_bytes) if role is EngineKind.DECODE else 0
            for name in names:
                self._scheduler.join(Engine(name, role, group=role.value, node=name, hbm_units=space))

    def assigned(self, event: dict[str, Any]) -> Assigned:
        raise Internal("no answer is pending: this assignment is synchronous", got=event["id"])

    def submit(self, wanted: Wanted) -> list[Assigned]:
        space = int((wanted.prompt + wanted.out) * self._token_bytes)
        self._scheduler.submit(NewRequest(wanted.name, wanted.prompt, space))
        return self._fetch()

    def prefilled(self, name: str) -> list[Assigned]:
        self._scheduler.prefill_done(name, self._generations[name])
        return self._fetch()

    def finished(self, name: str) -> list[Assigned]:
        self._scheduler.finish(name, self._generations[name])
        return self._fetch()

    def _fetch(self) -> list[Assigned]:
        pairs: list[PairedRequest] = []
        for role in (EngineKind.PREFILL, EngineKind.DECODE):
            pairs += self._scheduler.fetch(role.value).pairs
        self._generations.update((pair.request_id, pair.generation) for pair in pairs)
        return [Assigned(pair.request_id, pair.prefill.engine, pair.decode.engine) for pair in pairs]


class ByServer:
    """The metadata server's scheduler, to which a process on the bed speaks as router and as leader of both groups.

    Answers come as events; ``assigned`` takes them.
    """

    def __init__(self, bed: EngineBed) -> None:
        self._router = bed.router
        self._generations: dict[str, int] = {}

    def assigned(self, event: dict[str, Any]) -> Assigned:
        """Process an answer of the router."""
        found = Assigned(event["id"], event["prefill"], event["decode"], event["generation"])
        self._generations[found.name] = found.generation
        return found

    def submit(self, wanted: Wanted) -> list[Assigned]:
        self._router.tell(do="assign", id=wanted.name, prompt=wanted.prompt, hit=wanted.hit, out=wanted.out)
        return []

    def prefilled(self, name: str) -> list[Assigned]:
        self._router.tell(do="ended", group="prefill", generation=self._generations[name])
        return []

    def finished(self, name: str) -> list[Assigned]:
        self._router.tell(do="ended", group="decode", generation=self._generations.pop(name))
        return []
