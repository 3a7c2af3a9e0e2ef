"""Predicted time at which all parts of a request have arrived. `split` minimises it, and every plan records it."""

from __future__ import annotations

from collections.abc import Iterable

from kvstore.dualpath.contract import NodeState, ReadSide


def finish_seconds(shares: Iterable[tuple[NodeState, ReadSide, int]], prefill: NodeState | None) -> float:
    """Return the seconds from now until the last byte is at the prefill engine.

    Args:
        shares: node, side and bytes of each share.
        prefill: the prefill node; None: unknown, so its CNIC is not considered.
    """
    latest = 0.0
    forwarded = 0
    for state, side, nbytes in shares:
        if (read := (state.pending_bytes + nbytes) / state.snic) > latest:
            latest = read
        if side is not ReadSide.PREFILL:
            if (sent := (state.sending_bytes + nbytes) / state.cnic) > latest:
                latest = sent
            forwarded += nbytes
    if forwarded and prefill is not None:
        latest = max(latest, (prefill.receiving_bytes + forwarded) / prefill.cnic)
    return latest
