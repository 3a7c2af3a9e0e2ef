"""How well GPUs are used: FLOP and bytes done, against the data sheet."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from kvstore.roofline.hardware import Gpu


@dataclass(frozen=True, slots=True)
class Utilization:
    """Work of the GPUs of one role.

    Attributes:
        gpu: their type.
        gpus: how many.
        weight_bytes: bytes per parameter, which choose the peak.
        flops: FLOP done by all of them.
        hbm_bytes: bytes read from the HBM of all of them, at least.
        seconds: in which this was done, busy or not.
    """

    gpu: Gpu
    gpus: int
    weight_bytes: float
    flops: float
    hbm_bytes: float
    seconds: float

    @property
    def mfu(self) -> float:
        """Share of the peak FLOP/s (model FLOP utilization)."""
        return self._share(self.flops, self.gpu.peak_flops(self.weight_bytes))

    @property
    def mbu(self) -> float:
        """Share of the HBM bandwidth (model bandwidth utilization)."""
        return self._share(self.hbm_bytes, self.gpu.hbm_bandwidth)

    @property
    def intensity(self) -> float:
        """FLOP per byte read from HBM; NaN without any."""
        return self.flops / self.hbm_bytes if self.hbm_bytes else math.nan

    @property
    def ridge(self) -> float:
        """Intensity above which the GPU's arithmetic is the limit, below which its memory is."""
        return self.gpu.ridge(self.weight_bytes)

    @property
    def bound(self) -> str:
        """The limit of the roofline at this intensity: ``compute`` or ``memory``."""
        return "compute" if self.intensity >= self.ridge else "memory"

    def to_json(self) -> dict[str, Any]:
        """Return plain values; an unknown intensity is None."""
        known = math.isfinite(self.intensity)
        return {
            "gpu": self.gpu.name,
            "gpus": self.gpus,
            "flops": self.flops,
            "hbm_bytes": self.hbm_bytes,
            "mfu": self.mfu,
            "mbu": self.mbu,
            "intensity": self.intensity if known else None,
            "ridge": self.ridge,
            "bound": self.bound if known else None,
        }

    def _share(self, done: float, peak: float) -> float:
        most = peak * self.gpus * self.seconds
        return done / most if most else 0.0
