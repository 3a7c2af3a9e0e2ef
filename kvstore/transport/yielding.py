"""How much of a link KV traffic may use while others use it too. Pure: counters in, bytes a second out.

*Foreign* is what the NIC counted beyond the host's KV traffic, headers included. KV keeps to ``target`` of the link, and to
what is left of that once foreign traffic is taken off *twice*: a flow that would take more, such as a bulk transfer, finds room
to grow and KV makes way step by step, while a small steady flow costs KV little. The share falls at once, rises in steps, and
never falls below a floor. Several processes of a host that follow this rule divide the room: each gets the part of it that it
uses, plus a little, so that whoever uses least gains.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from kvstore.core.errors import InvalidArgument

WINDOW_SAMPLES = 5
"""Rates are taken over so many samples: NIC and sockets count at slightly different moments."""
_FOREIGN_WEIGHT = 2.0
_NOISE_SHARE = 0.01
"""Less than this part of the link is not told from what sockets and NIC count differently; the target leaves it room."""
_RISE_SHARE = 0.05
_GAIN = 1 / 64


@dataclass(frozen=True, slots=True)
class YieldRule:
    """When to make way for others.

    Attributes:
        link_bytes_per_s: rate of the link, each direction.
        target: part of the link that KV may fill alone: what is left keeps queues short.
        floor: part of the link that KV keeps whatever others do.

    Raises:
        InvalidArgument: impossible numbers.
    """

    link_bytes_per_s: float
    target: float = 0.9
    floor: float = 0.05

    def __post_init__(self) -> None:
        if not (self.link_bytes_per_s > 0 and 0 < self.floor <= self.target <= 1):
            raise InvalidArgument("a link has a rate, and KV a floor of it up to its target", rule=self)


@dataclass(frozen=True, slots=True)
class LinkSample:
    """Totals of one direction of a link; they only grow.

    Attributes:
        at_s: when, seconds.
        nic_bytes: all that the NIC counted.
        kv_bytes: of the host's KV sockets, headers included as well as known.
        own_bytes: of this process's KV sockets.
    """

    at_s: float
    nic_bytes: int
    kv_bytes: int
    own_bytes: int


class KvShare:
    """One direction of a link, as one process sees it."""

    def __init__(self, rule: YieldRule) -> None:
        self._rule = rule
        self._samples: deque[LinkSample] = deque(maxlen=WINDOW_SAMPLES)
        self.room = rule.target * rule.link_bytes_per_s
        """Bytes a second for all KV traffic of the host."""
        self.foreign = 0.0
        """Bytes a second of all other traffic, as last seen."""

    def observe(self, sample: LinkSample) -> float:
        """Takes in a sample; the bytes a second that this process may use from now on."""
        rule = self._rule
        if self._samples and not _follows(self._samples[-1], sample):
            self._samples.clear()  # an interface was replaced: its counters began anew
        self._samples.append(sample)
        link = rule.link_bytes_per_s
        nic, kv, own = self._rates()
        self.foreign = nic - kv if nic - kv > _NOISE_SHARE * link else 0.0
        left = max(rule.target * link - _FOREIGN_WEIGHT * self.foreign, rule.floor * link)
        self.room = min(left, self.room + _RISE_SHARE * link)
        own = min(own, kv)
        gain = _GAIN * self.room
        part = self.room * (own + gain) / (kv + gain)
        unused = own + self.room - kv
        return max(part, unused, rule.floor * link)

    def _rates(self) -> tuple[float, float, float]:
        first, last = self._samples[0], self._samples[-1]
        span_s = last.at_s - first.at_s
        if span_s <= 0:
            return 0.0, 0.0, 0.0
        return (
            (last.nic_bytes - first.nic_bytes) / span_s,
            (last.kv_bytes - first.kv_bytes) / span_s,
            (last.own_bytes - first.own_bytes) / span_s,
        )


def _follows(before: LinkSample, after: LinkSample) -> bool:
    """Whether nothing ran backwards."""
    return all(
        old <= new
        for old, new in (
            (before.at_s, after.at_s),
            (before.nic_bytes, after.nic_bytes),
            (before.kv_bytes, after.kv_bytes),
            (before.own_bytes, after.own_bytes),
        )
    )
