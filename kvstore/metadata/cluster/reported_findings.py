"""Checks of the findings in a heartbeat. They come from outside, and operators see them."""

from __future__ import annotations

from kvproto.v1.metadata_pb2 import HeartbeatRequest
from kvstore.core import limits
from kvstore.core.errors import InvalidArgument


def check_findings(report: HeartbeatRequest) -> None:
    """Check the number and size of a node's findings.

    Raises:
        InvalidArgument: too many, or one is too long.
    """
    if len(report.findings) > limits.MAX_NODE_FINDINGS:
        raise InvalidArgument("too many findings", got=len(report.findings), limit=limits.MAX_NODE_FINDINGS)
    for one in report.findings:
        if len(one.facts) > limits.MAX_REASON:
            raise InvalidArgument("the facts of a finding are too long", got=len(one.facts), limit=limits.MAX_REASON)
        if len(one.code) > limits.MAX_CODE_BYTES or len(one.subject.encode()) > limits.MAX_NAME_BYTES:
            raise InvalidArgument("the code or subject of a finding is too long", code=one.code[: limits.MAX_CODE_BYTES])
