"""Engine groups whose leaders report to the scheduler, and the engines that joined with them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Final

from kvproto.v1 import metadata_pb2 as pb
from kvstore.core.errors import CapacityExceeded, Conflict
from kvstore.dualpath.groups import Engine, EngineKind
from kvstore.metadata.scheduling.outbox import Outbox

MAX_GROUPS: Final = 4_096
MAX_ENGINES: Final = 65_536
FORMER_BOOTS: Final = 64
"""Replaced boots of a group whose reports are rejected: late ones, and those of routers that stand by."""


@dataclass(slots=True)
class ReportingGroup:
    """A group of engines whose leader reports.

    Attributes:
        name: name of the group.
        kind: role of all its engines.
        boot: boot id of the group.
        membership: id of this stay of the boot; a boot that was silent for long joins again under a new id.
        former: boots that this boot replaced; their reports are rejected.
        sequence: number of the last report that counted.
        heard_s: time of the last report.
        engines: its engines, by name.
        refs: how each engine is described to others.
        outbox: events for the group.
    """

    name: str
    kind: EngineKind
    boot: bytes
    membership: bytes
    former: tuple[bytes, ...]
    sequence: int
    heard_s: float
    engines: dict[str, Engine] = field(default_factory=dict)
    refs: dict[str, pb.EngineRef] = field(default_factory=dict)
    outbox: Outbox = field(default_factory=Outbox)

    def next_former(self) -> tuple[bytes, ...]:
        """The replaced boots of the boot that replaces this one."""
        return (*self.former, self.boot)[-FORMER_BOOTS:]


class GroupTable:
    """All groups, and the group of each engine."""

    def __init__(self) -> None:
        self._groups: dict[str, ReportingGroup] = {}
        self._group_of: dict[str, str] = {}  # engine -> group

    @property
    def engines(self) -> int:
        """Number of engines in all groups."""
        return len(self._group_of)

    def all(self) -> list[ReportingGroup]:
        """All groups."""
        return list(self._groups.values())

    def get(self, name: str) -> ReportingGroup | None:
        """A group by its name."""
        return self._groups.get(name)

    def check(self, request: pb.ReportEnginesRequest, engines: Collection[str]) -> None:
        """Check whether a report may be accepted.

        Raises:
            Conflict: an engine of this name is in another group, or another boot of the group has replaced this one.
            CapacityExceeded: too many groups or engines.
        """
        group = self._groups.get(request.group)
        if group is not None and request.boot_id in group.former:
            raise Conflict("another boot of this group has replaced this one", group=request.group)
        for name in engines:
            if self._group_of.get(name, request.group) != request.group:
                raise Conflict("an engine of this name is in another group", engine=name, group=self._group_of[name])
        added = len(engines) - (len(group.engines) if group is not None else 0)
        if self.engines + added > MAX_ENGINES or (group is None and len(self._groups) >= MAX_GROUPS):
            raise CapacityExceeded("too many engines or engine groups", engines=self.engines, groups=len(self._groups))

    def add(self, group: ReportingGroup) -> None:
        """Add a group without engines."""
        self._groups[group.name] = group

    def remove(self, group: ReportingGroup) -> None:
        """Remove a group: it gets no further events. Its engines are removed one by one."""
        del self._groups[group.name]

    def add_engine(self, group: ReportingGroup, engine: Engine) -> None:
        """Add an engine to a group."""
        group.engines[engine.engine] = engine
        self._group_of[engine.engine] = group.name

    def remove_engine(self, group: ReportingGroup, name: str) -> Engine:
        """Remove an engine from a group."""
        del group.refs[name], self._group_of[name]
        return group.engines.pop(name)

    def ref(self, engine: Engine | None) -> pb.EngineRef | None:
        """The description of an engine for others. An engine that has done its part may be removed: then it lacks the address."""
        if engine is None:
            return None
        group = self._groups.get(engine.group)
        known = group.refs.get(engine.engine) if group is not None else None
        return known or pb.EngineRef(engine=engine.engine, node=engine.node, group=engine.group)
