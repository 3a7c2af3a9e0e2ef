"""Reports of engine group leaders: checks, and the figures that the scheduler uses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from kvproto.v1 import metadata_pb2 as pb
from kvstore.core.errors import InvalidArgument
from kvstore.dualpath.groups import Engine, EngineKind
from kvstore.dualpath.scheduler import MAX_HBM_UNITS, MAX_TOKENS, EngineReport
from kvstore.metadata.scheduling.groups import ReportingGroup
from kvstore.rpc.codec import check_id, check_name

MAX_GROUP_ENGINES: Final = 4_096
MAX_ENDED: Final = 65_536
"""Maximum number of prefilled and finished requests per report."""

_KINDS: Final = {pb.ENGINE_ROLE_PREFILL: EngineKind.PREFILL, pb.ENGINE_ROLE_DECODE: EngineKind.DECODE}


def check_report(request: pb.ReportEnginesRequest) -> dict[str, Engine]:
    """Check a report.

    Returns:
        Its engines, by name.

    Raises:
        InvalidArgument: a name, a count or a figure is out of bounds.
    """
    group = check_name(request.group, "group")
    check_id(request.boot_id, "boot_id")
    if request.membership:
        check_id(request.membership, "membership")
    kind = _KINDS.get(request.role)
    if kind is None:
        raise InvalidArgument("role is unspecified or unknown", got=request.role)
    if request.sequence < 1:
        raise InvalidArgument("sequence must be at least 1", got=request.sequence)
    if len(request.engines) > MAX_GROUP_ENGINES:
        raise InvalidArgument("too many engines in a group", got=len(request.engines), limit=MAX_GROUP_ENGINES)
    if len(request.prefilled) + len(request.finished) > MAX_ENDED:
        raise InvalidArgument("too many requests in one report", limit=MAX_ENDED)
    if request.finished and kind is EngineKind.PREFILL:
        raise InvalidArgument(
            "a prefill group reports prefilled requests; only a decode group reports finished ones", group=group
        )
    engines = {}
    for state in request.engines:
        name = check_name(state.engine, "engine")
        if name in engines:
            raise InvalidArgument("duplicate engine name", engine=name)
        _check_state(state, kind)
        engines[name] = Engine(name, kind, group, check_name(state.node, "node"), state.hbm_tokens)
    return engines


def _check_state(state: pb.EngineState, kind: EngineKind) -> None:
    if state.address:
        check_name(state.address, "address")
    figures = (state.hbm_tokens, state.sequences, state.tokens, state.free_hbm_tokens, state.read_tokens)
    if max(figures) > MAX_TOKENS:
        raise InvalidArgument("a figure of an engine is out of bounds", engine=state.engine, limit=MAX_TOKENS)
    if state.HasField("tokens") != state.HasField("sequences"):
        raise InvalidArgument("sequences and tokens must be reported together", engine=state.engine)
    if kind is EngineKind.PREFILL and (state.hbm_tokens or state.HasField("free_hbm_tokens")):
        raise InvalidArgument("only decode engines report hbm_tokens and free_hbm_tokens", engine=state.engine)


def figures_of(
    request: pb.ReportEnginesRequest, group: ReportingGroup, pending_tokens: Callable[[str], int]
) -> list[EngineReport]:
    """The figures of a group's engines for the scheduler. Sums above its bound are cut to it, so every checked report is valid.

    Args:
        request: a checked report.
        group: the group. Work in its outbox is added: the engines could not count it yet.
        pending_tokens: returns the planned reads of a node. A node may have unplanned reads, and planned reads may not have
            reached it. Mostly both are the same reads, so the larger figure counts, not the sum.
    """
    figures = []
    for state in request.engines:
        unread = group.outbox.unread(state.engine)
        counts, free = state.HasField("tokens"), state.HasField("free_hbm_tokens")
        figures.append(
            EngineReport(
                state.engine,
                seq=min(state.sequences + unread.sequences, MAX_HBM_UNITS) if counts else None,
                tok=min(state.tokens + unread.tokens, MAX_HBM_UNITS) if counts else None,
                hbm_free=max(0, state.free_hbm_tokens - unread.hbm_tokens) if free else None,
                read_tokens=min(max(state.read_tokens, pending_tokens(state.node)), MAX_HBM_UNITS),
            )
        )
    return figures


def ref_of(state: pb.EngineState, group: str) -> pb.EngineRef:
    """The description of an engine for others."""
    return pb.EngineRef(engine=state.engine, node=state.node, group=group, address=state.address)
