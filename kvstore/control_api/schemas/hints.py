"""JSON schemas of hints about sessions."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from kvstore.control_api.schemas.base import RequestModel, ResponseModel
from kvstore.control_api.schemas.store import Count, HexId, NodeName, UnreachableNode
from kvstore.core import limits

_MAX_KEEP_S = limits.MAX_KEEP_MS / 1000


class HintSession(RequestModel):
    """What happens next in a session."""

    session: str = Field(
        min_length=1,
        max_length=limits.MAX_TRANSFER_ID_BYTES,
        description="name of the session, printable text of at most 64 bytes",
        examples=["chat-7"],
    )
    keep_for_s: float = Field(
        default=300.0, ge=0, le=_MAX_KEEP_S, description="how long the session's blocks are protected", examples=[600.0]
    )
    next_turn_s: float | None = Field(
        default=None, ge=0, le=_MAX_KEEP_S, description="seconds until its next turn is expected; null: unknown", examples=[20.0]
    )
    priority: int = Field(
        default=0,
        ge=0,
        le=limits.MAX_HINT_PRIORITY,
        description="sessions of a higher priority displace those of a lower one of the same tenant",
        examples=[0],
    )
    end: bool = Field(
        default=False,
        description="the session has ended: its blocks are evicted first, other fields are ignored",
        examples=[False],
    )

    @model_validator(mode="after")
    def _printable(self) -> Self:
        if not self.session.isprintable() or len(self.session.encode()) > limits.MAX_TRANSFER_ID_BYTES:
            raise ValueError(f"session must be printable text of 1 to {limits.MAX_TRANSFER_ID_BYTES} bytes")
        return self


class NodeHinted(ResponseModel):
    """Effect of a hint on one node that protected blocks of the session."""

    node_id: NodeName
    protected_blocks: Count = Field(description="leading blocks that the session protects now", examples=[640])
    dropped_blocks: Count = Field(description="blocks that are evicted first from now on", examples=[0])


class SessionHinted(ResponseModel):
    """Effect of a hint about a session."""

    namespace_id: HexId = Field(description="namespace of the session")
    session: str = Field(description="name of the session", examples=["chat-7"])
    nodes: list[NodeHinted] = Field(description="effect by node, without nodes that do not know the session")
    unreached: list[UnreachableNode] = Field(
        description="nodes that failed or did not answer in time; they may have applied the hint"
    )
