"""Path policies: which node reads how much of a request."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvstore.core.errors import InvalidArgument
from kvstore.dualpath.contract import NodeState, PlanPolicy, PlanRequest, ReadSide, Share
from kvstore.dualpath.split import Split

Candidates = Sequence[tuple[NodeState, ReadSide]]


class PrefillOnly:
    """The usual policy: the prefill engine's node reads everything (another node only if that node cannot)."""

    name = "prefill_only"

    def choose(self, request: PlanRequest, nodes: Candidates, prefill: NodeState | None) -> Sequence[Share]:  # noqa: ARG002
        state, side = nodes[0]
        return (Share(state.node, side, request.blocks),)


class ShorterQueue:
    """The paper: the whole request on the side whose node has fewer tokens to read; at a tie the prefill side.

    Relays are used only where neither side can read.
    """

    name = "shorter_queue"

    def choose(self, request: PlanRequest, nodes: Candidates, prefill: NodeState | None) -> Sequence[Share]:  # noqa: ARG002
        pair = [entry for entry in nodes if entry[1] is not ReadSide.RELAY] or nodes
        state, side = min(pair, key=lambda entry: entry[0].pending_tokens)
        return (Share(state.node, side, request.blocks),)


class RoundRobin:
    """Whole requests in turn over the prefill and the decode side. This is the only policy with state: the next turn.

    Relays are used only where neither side can read.
    """

    name = "round_robin"

    def __init__(self) -> None:
        self._turn = 0

    def choose(self, request: PlanRequest, nodes: Candidates, prefill: NodeState | None) -> Sequence[Share]:  # noqa: ARG002
        pair = [entry for entry in nodes if entry[1] is not ReadSide.RELAY] or nodes
        state, side = pair[self._turn % len(pair)]
        self._turn += 1
        return (Share(state.node, side, request.blocks),)


class Oracle:
    """Reads nothing: simulates infinitely fast storage. Only for measurements."""

    name = "oracle"

    def choose(self, request: PlanRequest, nodes: Candidates, prefill: NodeState | None) -> Sequence[Share]:  # noqa: ARG002
        return ()


POLICIES: dict[str, Callable[[], PlanPolicy]] = {
    "prefill_only": PrefillOnly,
    "round_robin": RoundRobin,
    "shorter_queue": ShorterQueue,
    "split": Split,
    "oracle": Oracle,
}
"""Policies by the name used in the configuration and on command lines."""


def policy_named(name: str) -> PlanPolicy:
    """Return a new policy with default parameters.

    Raises:
        InvalidArgument: no policy has this name.
    """
    if name not in POLICIES:
        raise InvalidArgument("no such path policy", policy=name, known=", ".join(POLICIES))
    return POLICIES[name]()
