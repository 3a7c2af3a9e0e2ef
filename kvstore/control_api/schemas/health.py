"""Schemas of the health of a store."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from kvstore.control_api.schemas.base import ResponseModel


class FindingDetail(ResponseModel):
    """A present problem, or a warning before one."""

    code: str = Field(description="health code, which scripts may rely on", examples=["NODE_DOWN"])
    severity: Literal["info", "warning", "error"] = Field(
        description="error: something does not work now; info: it does not change the health", examples=["error"]
    )
    subject: str | None = Field(
        description="node, volume or tenant that it is about; null: the metadata server", examples=["host-2"]
    )
    facts: str = Field(
        description="one sentence with names and figures",
        examples=["Node host-2 has not reported for 22 s: nothing listens on 10.0.0.2:7410."],
    )
    title: str = Field(description="the code in a few words", examples=["A node's process has ended"])
    meaning: str = Field(description="consequence for engines and data", examples=["Its blocks are misses."])
    action: str = Field(description="first step of the operator", examples=["Start the node again on its host."])
    docs: str = Field(description="page of the code in the documentation", examples=["docs/reference/health/node-down.md"])


class ClusterHealth(ResponseModel):
    """Health of the store."""

    health: Literal["ok", "warning", "error"] = Field(description="the worst severity of the findings", examples=["error"])
    findings: list[FindingDetail] = Field(description="present findings, errors first; at most 100")


class ClusterEventEntry(ResponseModel):
    """An event of the last 24 hours."""

    id: str = Field(description="ascending number", examples=["1767225600000000"])
    at_s: float = Field(description="when it happened, Unix time", examples=[1767225600.0])
    kind: str = Field(
        description="metadata_started, metadata_stopped, node_registered, node_restarted, node_back, node_drain, node_removed,"
        " finding_raised, finding_cleared or order",
        examples=["finding_raised"],
    )
    subject: str | None = Field(
        description="node, volume, tenant or namespace that it is about; null: the metadata server", examples=["host-2"]
    )
    text: str = Field(description="one sentence", examples=["Node host-2 reports again."])
    code: str | None = Field(description="health code of a finding; null: another kind of event", examples=["NODE_DOWN"])
    who: str | None = Field(
        description="who gave an order: name of the token, and through which admin server; null: none or no tokens",
        examples=["alice (via admin-1)"],
    )
