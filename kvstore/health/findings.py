"""A finding: one health code that applies now, with its subject and the facts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from kvproto.v1 import common_pb2
from kvstore.core.limits import MAX_NAME_BYTES, MAX_REASON
from kvstore.health.codes import HealthCode, Severity, code_named

Overall = Literal["ok", "warning", "error"]
_ORDER: Final = (Severity.ERROR, Severity.WARNING, Severity.INFO)
MAX_FINDINGS: Final = 100
"""Findings of one answer."""


@dataclass(frozen=True, slots=True)
class HealthFinding:
    """A present problem, or a warning before one.

    Attributes:
        code: the registered code.
        subject: the node, volume, tenant or file that it is about; empty: the metadata server.
        facts: one sentence with names and figures.
    """

    code: HealthCode
    subject: str
    facts: str

    @property
    def severity(self) -> Severity:
        """Severity of the code."""
        return self.code.severity

    @property
    def identity(self) -> tuple[str, str]:
        """Code and subject, which stay the same while the facts change."""
        return self.code.name, self.subject

    def to_proto(self) -> common_pb2.Finding:
        """Convert to a message, with subject and facts cut to their maximum length, beyond which a heartbeat is rejected."""
        subject = self.subject.encode()[:MAX_NAME_BYTES].decode(errors="ignore")
        return common_pb2.Finding(code=self.code.name, subject=subject, facts=self.facts[:MAX_REASON])


def from_proto(found: Iterable[common_pb2.Finding]) -> list[HealthFinding]:
    """Read findings of another process. A code of a newer version is shown as a warning."""
    return [HealthFinding(code_named(one.code), one.subject, one.facts) for one in found]


def overall(found: Sequence[HealthFinding]) -> Overall:
    """Return the worst severity. Findings of severity info do not count."""
    severities = {one.severity for one in found}
    if Severity.ERROR in severities:
        return "error"
    return "warning" if Severity.WARNING in severities else "ok"


def by_severity(found: Iterable[HealthFinding]) -> list[HealthFinding]:
    """Sort errors before warnings and these before the rest, then by code and subject."""
    return sorted(found, key=lambda one: (_ORDER.index(one.severity), *one.identity))
