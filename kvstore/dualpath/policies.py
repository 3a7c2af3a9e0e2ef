"""Path policies: which node reads how much of a request."""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.dualpath.contract import NodeState, ReadRequest, ReadSide, Share

Candidates = Sequence[tuple[NodeState, ReadSide]]


class PrefillOnly:
    """What everybody does: the prefill engine's node reads everything (another one only if that node cannot)."""

    name = "prefill_only"

    def choose(self, request: ReadRequest, nodes: Candidates, prefill: NodeState | None) -> Sequence[Share]:  # noqa: ARG002
        state, side = nodes[0]
        return (Share(state.node, side, request.blocks),)


class ShorterQueue:
    """The paper: the whole request on the side whose node has fewer tokens to read; at a tie the prefill side.

    Relays are used only where neither side can read.
    """

    name = "shorter_queue"

    def choose(self, request: ReadRequest, nodes: Candidates, prefill: NodeState | None) -> Sequence[Share]:  # noqa: ARG002
        pair = [entry for entry in nodes if entry[1] is not ReadSide.RELAY] or nodes
        state, side = min(pair, key=lambda entry: entry[0].pending_tokens)
        return (Share(state.node, side, request.blocks),)
