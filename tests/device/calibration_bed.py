"""Trial copies with scripted durations: real copies of a late device, and a clock that only the script moves."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from caches import make_cache
from deferred import DeferredDevice, FakePinning

pytest.importorskip("triton", reason="Triton is not installed")
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when the kernel is first imported

from kvclient.device.calibration import copy_directions, trial
from kvclient.device.calibration.choice import CANDIDATES, DIRECTIONS
from kvclient.device.copier import DeviceCopier
from kvclient.device.copy_strategies import BatchedCopy, StagedCopy
from kvclient.device.page_scatter import TorchScatter

ALL = tuple((direction, name) for direction in DIRECTIONS for name in CANDIDATES[direction])


class FakeDirect(BatchedCopy):
    """Strategy ``direct`` without its kernel, which is slow in Triton's interpreter."""

    def __init__(self, device: Any, cache: Any) -> None:
        super().__init__(device, cache)
        self.name = "direct"


class TorchStaged(StagedCopy):
    """Strategy ``staged`` without the kernel."""

    def __init__(self, device: Any, cache: Any, _: Any, codec: Any, staging_bytes: int) -> None:
        super().__init__(device, cache, TorchScatter(cache), codec, staging_bytes)


class Script:
    """Speeds of the trial copies in bytes per second, their errors, and a clock.

    Attributes:
        speeds: by direction and strategy.
        errors: raised by a copy before it begins.
        empty: copies that copy nothing.
        begun: copies by direction and strategy, in order.
    """

    def __init__(self, speeds: dict[tuple[str, str], float]) -> None:
        self.speeds = speeds
        self.errors: dict[tuple[str, str], Exception] = {}
        self.empty: set[tuple[str, str]] = set()
        self.begun: list[tuple[str, str]] = []
        self.now = 0.0

    def now_s(self) -> float:
        return self.now

    def install(self, patch: pytest.MonkeyPatch) -> Script:
        for name, base in (("BatchedCopy", BatchedCopy), ("StagedCopy", TorchStaged), ("DirectCopy", FakeDirect)):
            patch.setattr(trial, name, self._timed(base))
        patch.setattr(copy_directions, "DirectCopy", FakeDirect)
        return self

    def _timed(self, base: type[Any]) -> type[Any]:
        script = self

        class Timed(base):  # type: ignore[misc]
            def load(self, blocks: Any, on_layer: Any) -> None:
                script.copy("load", self.name, blocks, lambda: super(Timed, self).load(blocks, on_layer))

            def store(self, blocks: Any) -> None:
                script.copy("store", self.name, blocks, lambda: super(Timed, self).store(blocks))

        return Timed

    def copy(self, direction: str, name: str, blocks: Any, work: Callable[[], None]) -> None:
        what = direction, name
        self.begun.append(what)
        if what in self.errors:
            raise self.errors[what]
        if what not in self.empty:
            work()
        self.now += len(blocks) * blocks.pitch / self.speeds[what]


def a_device(seed: int = 0) -> DeferredDevice:
    """A device whose kernels run, in Triton's interpreter, and which needs pins."""
    device = DeferredDevice(seed, FakePinning())
    device.memory = torch.device("cuda", 0)
    return device


def a_copier(device: DeferredDevice, layout: str = "mla", **choices: Any) -> DeviceCopier:
    return DeviceCopier(make_cache(layout), device=device, checksums=False, **choices)
