"""Command lines of ``tc`` for a link: its rate, and a traffic class for KV. Pure: settings in, command lines out.

A link is shaped at the *sender*: at the host for outgoing packets, at the switch's port for incoming packets. Plain links have
a token bucket (``tbf``). With a ``LinkTrafficClass`` they have two classes (``htb``), distinguished by the DSCP in the IPv4
header: KV traffic has a small guaranteed share and a ceiling and uses unused capacity; the rest is guaranteed to other traffic,
which has priority.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvstore.core.errors import InvalidArgument

MTU = 9000
QUEUE_MS = 20.0
"""How long a packet may wait in a shaped queue before packets are dropped."""
_BUCKET_MS = 2.0
_BUCKET_BYTES = (80 << 10, 256 << 10)
"""A bucket must hold a 64 KiB segment (tbf would otherwise divide it); larger buckets were inexact at 8 Gbit/s."""
_LEAST_MBIT, _MOST_MBIT = 1.0, 100_000.0
_QUANTUM_BYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class LinkTrafficClass:
    """How KV traffic shares a link with everything else.

    Attributes:
        dscp: mark of KV packets, 1 to 63 (the upper six bits of the TOS byte).
        floor_mbit: what KV is guaranteed, Mbit/s, so that it never starves; all other traffic is guaranteed the rest of the link.
        ceil_mbit: the most that KV may use, Mbit/s; None: all that is left over.
    """

    dscp: int
    floor_mbit: float
    ceil_mbit: float | None = None

    def check(self, rate_mbit: float) -> None:
        """Check the class against the rate of its link.

        Raises:
            InvalidArgument: the link is too slow for the class, or the mark is out of bounds.
        """
        if not 1 <= self.dscp <= 63:
            raise InvalidArgument("the DSCP mark must be 1 to 63", dscp=self.dscp)
        ceil = rate_mbit if self.ceil_mbit is None else self.ceil_mbit
        if not (_LEAST_MBIT <= self.floor_mbit <= ceil <= rate_mbit and self.floor_mbit <= rate_mbit - _LEAST_MBIT):
            raise InvalidArgument(
                "the floor of KV must be at least 1 Mbit/s, at most the ceiling, and leave 1 Mbit/s of the link's rate",
                floor=self.floor_mbit,
                ceil=ceil,
                rate=rate_mbit,
            )


@dataclass(frozen=True, slots=True)
class LinkSettings:
    """A link's rate and class.

    Attributes:
        rate_mbit: both directions, Mbit/s on the wire (headers count); None: not limited.
        kv: the class for KV traffic, only on a limited link; None: all traffic alike.

    Raises:
        InvalidArgument: out of bounds.
    """

    rate_mbit: float | None
    kv: LinkTrafficClass | None = None

    def __post_init__(self) -> None:
        check_rate(self.rate_mbit)
        if self.kv is not None:
            if self.rate_mbit is None:
                raise InvalidArgument("a traffic class requires a link with a rate; set its rate first")
            self.kv.check(self.rate_mbit)


def check_rate(rate_mbit: float | None) -> None:
    """Check the rate of a link. Raises InvalidArgument."""
    if rate_mbit is not None and not (math.isfinite(rate_mbit) and _LEAST_MBIT <= rate_mbit <= _MOST_MBIT):
        raise InvalidArgument(f"the rate must be {_LEAST_MBIT:.0f} to {_MOST_MBIT:.0f} Mbit/s", rate=rate_mbit)


def bucket_bytes(rate_mbit: float) -> int:
    """Depth of the token bucket: the burst after a pause."""
    least, most = _BUCKET_BYTES
    return min(most, max(least, int(rate_mbit * 125 * _BUCKET_MS)))


def change_lines(device: str, before: LinkSettings, after: LinkSettings) -> list[str]:
    """Lines for ``tc -batch`` that bring one end of a link from one setting to another.

    A plain rate changes in place, without losing a packet; where classes come or go, the packets that wait are dropped, as TCP is
    used to.
    """
    if before == after:
        return []
    lines = []
    # htb cannot be changed into htb; it is deleted and added again
    if before.kv is not None or (after.rate_mbit is None and before.rate_mbit is not None):
        lines.append(f"qdisc del dev {device} root")
    return lines + _lines(device, after)


def _lines(device: str, settings: LinkSettings) -> list[str]:
    rate = settings.rate_mbit
    if rate is None:
        return []
    if settings.kv is None:
        return [f"qdisc replace dev {device} root tbf rate {_bits(rate)} burst {bucket_bytes(rate)} latency {QUEUE_MS:g}ms"]
    kv = settings.kv
    limit = int(rate * 125 * QUEUE_MS) + bucket_bytes(rate)
    return [
        f"qdisc replace dev {device} root handle 1: htb default 20",
        f"class add dev {device} parent 1: classid 1:1 {_htb(rate, rate)}",
        f"class add dev {device} parent 1:1 classid 1:10 {_htb(kv.floor_mbit, kv.ceil_mbit or rate)} prio 1",
        f"class add dev {device} parent 1:1 classid 1:20 {_htb(rate - kv.floor_mbit, rate)} prio 0",
        f"qdisc add dev {device} parent 1:10 bfifo limit {limit}",
        f"qdisc add dev {device} parent 1:20 bfifo limit {limit}",
        f"filter add dev {device} parent 1: protocol ip prio 1 u32 match ip dsfield {kv.dscp << 2:#04x} 0xfc flowid 1:10",
    ]


def _htb(rate_mbit: float, ceil_mbit: float) -> str:
    burst, ceil_burst = bucket_bytes(rate_mbit), bucket_bytes(ceil_mbit)
    return f"htb rate {_bits(rate_mbit)} ceil {_bits(ceil_mbit)} burst {burst} cburst {ceil_burst} quantum {_QUANTUM_BYTES}"


def _bits(mbit: float) -> str:
    return f"{round(mbit * 1e6)}bit"
