"""What leaders of engine groups report, checked at the door, and what is kept of each group."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from kvproto.v1 import metadata_pb2 as pb
from kvstore.core.errors import InvalidArgument
from kvstore.dualpath.groups import Engine, EngineKind
from kvstore.dualpath.scheduler import MAX_TOKENS, EngineReport
from kvstore.metadata.scheduling.outbox import Outbox
from kvstore.rpc.codec import check_id, check_name

MAX_GROUP_ENGINES: Final = 4_096
MAX_ENDED: Final = 65_536
"""Requests that one report may say to be computed or done."""

_ROLES: Final = {pb.ENGINE_ROLE_PREFILL: EngineKind.PREFILL, pb.ENGINE_ROLE_DECODE: EngineKind.DECODE}


@dataclass(slots=True)
class ReportingGroup:
    """A group of engines whose leader reports.

    Attributes:
        name: of the group.
        role: of all its engines.
        boot: this volume epoch of it.
        membership: this stay of it here; a boot that was silent for long comes back under another.
        former: boots that this one replaced; they may not report any more.
        sequence: of the last report that counted.
        heard_s: when it came.
        engines: as they joined.
        refs: what others are told of them.
        mail: what the group must know.
    """

    name: str
    role: EngineKind
    boot: bytes
    membership: bytes
    former: tuple[bytes, ...]
    sequence: int
    heard_s: float
    engines: dict[str, Engine] = field(default_factory=dict)
    refs: dict[str, pb.EngineRef] = field(default_factory=dict)
    mail: Outbox = field(default_factory=Outbox)


def check_report(request: pb.ReportEnginesRequest) -> dict[str, Engine]:
    """A report's shape.

    Returns:
        Its engines, by name.

    Raises:
        InvalidArgument: a name, a count or a figure is out of bounds.
    """
    group = check_name(request.group, "group")
    check_id(request.boot_id, "boot_id")
    if request.membership:
        check_id(request.membership, "membership")
    role = _ROLES.get(request.role)
    if role is None:
        raise InvalidArgument("role is unspecified or unknown", got=request.role)
    if request.sequence < 1:
        raise InvalidArgument("reports count from 1", got=request.sequence)
    if len(request.engines) > MAX_GROUP_ENGINES:
        raise InvalidArgument("too many engines in a group", got=len(request.engines), limit=MAX_GROUP_ENGINES)
    if len(request.prefilled) + len(request.finished) > MAX_ENDED:
        raise InvalidArgument("too many requests in one report", limit=MAX_ENDED)
    if request.finished and role is EngineKind.PREFILL:
        raise InvalidArgument("a prefill group says what is prefilled; a decode group says what is finished", group=group)
    engines = {}
    for state in request.engines:
        name = check_name(state.engine, "engine")
        if name in engines:
            raise InvalidArgument("an engine is named twice", engine=name)
        _check_state(state, role)
        engines[name] = Engine(name, role, group, check_name(state.node, "node"), state.hbm_tokens)
    return engines


def _check_state(state: pb.EngineState, role: EngineKind) -> None:
    if state.address:
        check_name(state.address, "address")
    figures = (state.hbm_tokens, state.sequences, state.tokens, state.free_hbm_tokens, state.read_tokens)
    if max(figures) > MAX_TOKENS:
        raise InvalidArgument("a figure of an engine is out of bounds", engine=state.engine, most=MAX_TOKENS)
    if state.HasField("tokens") != state.HasField("sequences"):
        raise InvalidArgument("sequences and tokens are reported together", engine=state.engine)
    if role is EngineKind.PREFILL and (state.hbm_tokens or state.HasField("free_hbm_tokens")):
        raise InvalidArgument("room for KV is asked of decode engines only", engine=state.engine)


def figures_of(
    request: pb.ReportEnginesRequest, group: ReportingGroup, pending_tokens: Callable[[str], int]
) -> list[EngineReport]:
    """What the scheduler is to know of a group's engines.

    Args:
        request: the report, checked.
        group: with its mailbox: what the engines could not count yet is added.
        pending_tokens: planned reads of a node. A node may read what nobody planned, and planned reads may not have
            reached it; but mostly both are the same reads, so the greater figure counts, not the sum.
    """
    figures = []
    for state in request.engines:
        unread = group.mail.unread(state.engine)
        counts, room = state.HasField("tokens"), state.HasField("free_hbm_tokens")
        figures.append(
            EngineReport(
                state.engine,
                seq=state.sequences + unread.sequences if counts else None,
                tok=state.tokens + unread.tokens if counts else None,
                hbm_free=max(0, state.free_hbm_tokens - unread.room) if room else None,
                read_tokens=max(state.read_tokens, pending_tokens(state.node)),
            )
        )
    return figures


def ref_of(state: pb.EngineState, group: str) -> pb.EngineRef:
    """An engine as others are told of it."""
    return pb.EngineRef(engine=state.engine, node=state.node, group=group, address=state.address)
