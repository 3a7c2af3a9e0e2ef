"""P:D ratios at which all storage links can be full without a bottleneck at CNIC or DRAM: equation 9 of the DualPath paper."""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvstore.core.errors import InvalidArgument

ROUNDING = 1e-9
"""Tolerance: a bed exactly on the bound counts as within it."""


@dataclass(frozen=True, slots=True)
class Bed:
    """Size and bandwidths of a cluster.

    Attributes:
        prefill_nodes: P.
        decode_nodes: D.
        gpus: g, GPUs (and CNICs) per node; fractional if a link represents a part of one.
        cnic: B, bytes/s of one CNIC in each direction.
        storage: s·B, bytes/s that one node reads from storage.
        dram: M, bytes/s of one node's memory, reads and writes together; infinite to ignore it.
    """

    prefill_nodes: int
    decode_nodes: int
    gpus: float
    cnic: float
    storage: float
    dram: float = math.inf

    def __post_init__(self) -> None:
        if self.prefill_nodes < 1 or self.decode_nodes < 1 or not self.dram > 0:
            raise InvalidArgument("prefill_nodes and decode_nodes must be at least 1, and dram above zero")
        if not all(0 < value < math.inf for value in (self.gpus, self.cnic, self.storage)):
            raise InvalidArgument("gpus, cnic and storage must be above zero and finite")


@dataclass(frozen=True, slots=True)
class RatioVerdict:
    """Result of the bound for a bed.

    Attributes:
        bed: the bed.
        ratio: P/D.
        lower: smallest P/D; infinite if there is none.
        upper: greatest P/D; negative if there is none.
        lower_by: the resource that sets the lower bound.
        upper_by: the resource that sets the upper bound.
        loads: use of each resource with all storage links full, as a share of its capacity: above 1 it is a bottleneck.
    """

    bed: Bed
    ratio: float
    lower: float
    upper: float
    lower_by: str
    upper_by: str
    loads: dict[str, float]

    @property
    def free(self) -> bool:
        """Whether no CNIC or DRAM is a bottleneck."""
        return max(self.loads.values()) <= 1.0 + ROUNDING

    @property
    def busiest(self) -> str:
        """The resource with the highest load."""
        return max(self.loads, key=self.loads.__getitem__)

    @property
    def sentence(self) -> str:
        """The verdict as one sentence for operators."""
        bed, load = self.bed, self.loads[self.busiest]
        name = f"{bed.prefill_nodes}P{bed.decode_nodes}D"
        if self.free:
            limit = (bed.prefill_nodes + bed.decode_nodes) / bed.prefill_nodes
            return (
                f"{name}: P/D = {self.ratio:.2f} lies within {self.lower:.2f} … {self.upper:.2f}: all storage links can be full, "
                f"loads up to {limit:.2f} times as fast as over the prefill nodes alone (busiest: {self.busiest}, {load:.0%})."
            )
        if self.lower > self.upper or max(self.loads["prefill CNIC read"], self.loads["prefill DRAM"]) > 1:
            share = bed.storage / (bed.gpus * bed.cnic)
            memory = bed.storage / bed.dram
            why = f"no P:D is free of bottlenecks, with storage at {share:.0%} of a node's CNICs and {memory:.0%} of its DRAM"
        elif self.ratio < self.lower:
            why = f"P/D = {self.ratio:.2f} is below {self.lower:.2f} ({self.lower_by})"
        else:
            why = f"P/D = {self.ratio:.2f} is above {self.upper:.2f} ({self.upper_by})"
        return f"{name}: {why}; with all storage links full, {self.busiest} would need {load:.0%} of what it has."


def judge(bed: Bed) -> RatioVerdict:
    """Apply equation 9 to a cluster."""
    ratio = bed.prefill_nodes / bed.decode_nodes
    s, g = bed.storage / bed.cnic, bed.gpus
    memory = bed.dram / bed.storage
    lower = s / (g - s) if g > s else math.inf
    uppers = {
        "decode CNIC read": (g - 2 * s) / s,
        "decode CNIC write": (g - s) / (2 * s),
        "decode DRAM": (memory - 3) / 2,
    }
    upper_by = min(uppers, key=uppers.__getitem__)
    loads = {
        "prefill CNIC read": 2 * s / g,
        "prefill CNIC write": s / g * (1 + 1 / ratio),
        "decode CNIC read": s / g * (ratio + 2),
        "decode CNIC write": s / g * (2 * ratio + 1),
        "prefill DRAM": 2 / memory,
        "decode DRAM": (3 + 2 * ratio) / memory,
    }
    return RatioVerdict(bed, ratio, lower, uppers[upper_by], "prefill CNIC write", upper_by, loads)
