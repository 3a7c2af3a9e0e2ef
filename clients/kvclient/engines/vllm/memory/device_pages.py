"""Pages of a KV cache on a device. ``DeviceCopier`` moves them on its own streams; this module defines the order.

* A store reads a step's results after a mark that the engine's thread made when the step had been submitted. * A load writes
after such a mark too, because submitted work may still use the page's previous content. * The engine uses a loaded layer after
its copy: its stream waits, not its thread (``LoadHandle.wait_layer``). A load outside of the batch completes only after its
copies. * Unfinished copies run before anything that is submitted to the device afterwards: ``clear``.

This module imports torch, which a vLLM worker has already imported.
"""

from __future__ import annotations

import logging
import mmap
import time
from collections.abc import Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from kvclient import BlockBuffer, BlockShape, CacheSpec, InvalidArgument
from kvclient.device import DeviceCopier, PagedCache
from kvclient.device.calibration.calibrator import CALIBRATE_S, Results
from kvclient.device.calibration.choice import CANDIDATES
from kvclient.device.int8 import ScaleGroups
from kvclient.device.streams import CpuDevice, CudaDevice, Device
from kvclient.engines.vllm.memory.pages import LAYOUTS, OTHER_LAYOUT, CopyRate, GroupPages, Mark, Pages, pages_per_block
from kvstore.core.errors import Internal

if TYPE_CHECKING:
    from kvclient.device.copier import StrategyName
    from kvclient.device.streams import Event
    from kvclient.gds.landing_ring import LandingRing
    from kvclient.gds.volume_reader import GdsMode

_log = logging.getLogger(__name__)
_COUNTED = (
    "device_loaded_bytes",
    "device_stored_bytes",
    "device_unpinned_bytes",
    "device_errors",
    "device_lost",
    "device_pin_refused",
    "device_pin_retries",
    "device_pin_turns_missed",
    "device_batch_refused",
    "device_checksums_by_host",
    "device_gds_blocks",
    "device_gds_busy",
    "device_gds_corrupt_blocks",
    "device_gds_failed_blocks",
    "device_gds_refused",
    "device_trials_failed",
    "device_trials_late",
    "device_uncalibrated",
    "device_without_triton",
    "hbm_disk_bugs",
    "hbm_disk_late_blocks",
    "hbm_not_registered_with_gds",
)
"""The copier's counters that the connector reports too."""
_TRIED_PAGES = 3
_PIN_S = 30.0
_CALIBRATE_ALL_S = 4.0
"""Bound of the trial copies of all groups. Groups with pages of one shape share their results."""
_kept: list[memoryview] = []


def make_pages(
    groups: Sequence[Sequence[torch.Tensor]],
    num_blocks: int,
    *,
    strategy: StrategyName,
    staging_bytes: int,
    checksums: bool = True,
    gds: GdsMode = "auto",
    ring_bytes: int = 128 << 20,
    int8: Sequence[ScaleGroups] | None = None,
) -> list[Pages]:
    """Create the pages of an engine by group, in host or device memory.

    Args:
        groups: per group, one tensor per layer.
        num_blocks: number of blocks of the block manager.
        strategy: how blocks are copied to a device; see ``kvclient.device.copy_strategies``.
        staging_bytes: size of each staging buffer on a device.
        checksums: whether a device computes checksums.
        gds: whether blocks are read from NVMe directly into device memory; see ``kvclient.gds``.
        ring_bytes: device memory for these reads, per group.
        int8: per group, the elements that share a scale in the store; None: blocks are stored as they are.

    Raises:
        InvalidArgument: the memory is neither the host's nor a CUDA device's, the layout is unknown, or pages cannot be stored as
            int8.
        Unavailable: a CUDA device without its driver.
        Internal: copies on the device return wrong data.
    """
    places = {tensor.device for group in groups for tensor in group}
    on_host = {place.type for place in places} == {"cpu"}
    if on_host and int8 is None:
        return [GroupPages(group, num_blocks) for group in groups]
    if len(places) != 1 or not (on_host or next(iter(places)).type == "cuda"):
        raise InvalidArgument(
            "a KV cache on several devices or on such a device is not supported: use a CPU, or one CUDA device per worker",
            devices=", ".join(sorted(str(place) for place in places)),
        )
    device = CpuDevice() if on_host else CudaDevice(next(iter(places)))
    return device_pages(
        groups,
        num_blocks,
        device,
        strategy=strategy,
        staging_bytes=staging_bytes,
        checksums=checksums,
        gds=gds,
        ring_bytes=ring_bytes,
        int8=int8,
    )


def device_pages(
    groups: Sequence[Sequence[torch.Tensor]],
    num_blocks: int,
    device: Device,
    *,
    strategy: StrategyName,
    staging_bytes: int,
    checksums: bool = True,
    gds: GdsMode = "auto",
    ring_bytes: int = 128 << 20,
    int8: Sequence[ScaleGroups] | None = None,
) -> list[Pages]:
    """Create the pages on the given device. Copies of each group are measured and tested before use."""
    pages = [
        DevicePages(
            group,
            num_blocks,
            device,
            strategy=strategy,
            staging_bytes=staging_bytes,
            checksums=checksums,
            gds=gds,
            ring_bytes=ring_bytes,
            int8=None if int8 is None else int8[number],
        )
        for number, group in enumerate(groups)
    ]
    known: dict[object, Results] = {}
    until_s = time.monotonic() + _CALIBRATE_ALL_S
    for one in pages:
        one.calibrate(min(CALIBRATE_S, until_s - time.monotonic()), known)
        one.try_out()
    return list(pages)


class DevicePages:
    """The pages of one KV cache group on a device; see ``Pages``.

    Args:
        tensors: one per layer, in layer order: ``[blocks, …]``, or ``[blocks * n, …]`` if kernels use smaller pages than the
            engine's block manager.
        num_blocks: number of blocks of the block manager.
        device: the device of the tensors.
        strategy: how blocks are copied.
        staging_bytes: size of each staging buffer.
        checksums: whether the device computes checksums.
        gds: whether blocks are read from NVMe directly into device memory.
        ring_bytes: device memory for these reads.
        int8: the elements that share a scale in the store; None: blocks are stored as they are.

    Raises:
        InvalidArgument: the layout is unknown, this device does not support the strategy, or the pages cannot be stored as int8.
    """

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        num_blocks: int,
        device: Device,
        *,
        strategy: StrategyName,
        staging_bytes: int,
        checksums: bool = True,
        gds: GdsMode = "auto",
        ring_bytes: int = 128 << 20,
        int8: ScaleGroups | None = None,
    ) -> None:
        try:
            cache = PagedCache([_whole_pages(tensor, num_blocks) for tensor in tensors])
        except InvalidArgument as error:
            raise InvalidArgument(
                f"this layout of the KV cache is not supported: {OTHER_LAYOUT}",
                reason=error,
                shape=tuple(tensors[0].shape),
                strides=tensors[0].stride(),
                supported=f"[blocks, heads, tokens, content] as {LAYOUTS} have it, one tensor per layer, layers of a group alike",
            ) from error
        self._copier = DeviceCopier(
            cache, strategy=strategy, staging_bytes=staging_bytes, checksums=checksums, device=device, int8=int8
        )
        from kvclient.gds.landing_ring import LandingRing  # parts of the node, which engines on a CPU do not load

        self._ring = LandingRing(self._copier, gds=gds, ring_bytes=ring_bytes)
        self.num_blocks = num_blocks
        self.shape: BlockShape = self._copier.shape
        self.codec_name = "" if self._copier.codec is None else self._copier.codec.name
        self._tried: dict[str, int] = {}
        """Counters of the copy test."""

    def mark(self) -> Event:
        return self._copier.mark()

    def buffer(self, block_ids: Sequence[int], after: Mark = None) -> BlockBuffer:
        return self._copier.blocks(block_ids, after=after)  # type: ignore[arg-type]  # a mark of this device

    def layer_buffer(self, layer: int, block_ids: Sequence[int], after: Mark = None) -> BlockBuffer:
        return self._copier.blocks(block_ids, layer=layer, after=after)  # type: ignore[arg-type]

    def clear(self, block_ids: Sequence[int]) -> None:
        self._copier.clear(list(dict.fromkeys(block_ids)))

    def watcher(self, spec: CacheSpec) -> DeviceCopier:
        self._copier.rename(spec)
        return self._copier

    def disk_reader(self) -> LandingRing:
        return self._ring

    def close(self) -> None:
        self._ring.close()

    def wait_pinned(self, timeout_s: float) -> bool:
        done = self._copier.wait_pinned(timeout_s)
        self._copier.serve()
        return done

    def suspend(self, timeout_s: float) -> None:
        self._copier.suspend(timeout_s)

    def resume(self) -> None:
        self._copier.resume()

    def counts(self) -> Mapping[str, int]:
        totals = self._copier.counters.snapshot()
        return {name: totals.get(f"{name}_total", 0) - self._tried.get(name, 0) for name in _COUNTED}

    def copy_rates(self) -> Sequence[CopyRate]:
        return [
            CopyRate(direction, name, name == choice.strategy, choice.rates.get(name, 0.0))
            for direction, choice in self._copier.choices.items()
            for name in dict.fromkeys([*CANDIDATES[direction], choice.strategy])
        ]

    def calibrate(self, timeout_s: float, known: MutableMapping[object, Results]) -> None:
        """Choose the copy strategies by trial copies; see ``DeviceCopier.calibrate``. Call it before ``try_out``."""
        self._copier.calibrate(timeout_s, known=known)

    def try_out(self) -> None:
        """Copy a few pages to the store's memory and back, the same way as later copies, to detect a faulty device or driver.

        Restores the pages; nothing may use them during the test.

        Raises:
            Internal: wrong bytes were returned, or none.
        """
        try:
            self._try_out()
        except RuntimeError as error:  # torch's current stream of the device
            raise Internal("the device fails", device=self._copier.cache.device, error=error) from error

    def _try_out(self) -> None:
        cache, copier = self._copier.cache, self._copier
        ids = sorted({0, self.num_blocks // 2, self.num_blocks - 1})[:_TRIED_PAGES]
        there = torch.tensor(ids, device=cache.device)
        layers = [layer.words(1) for layer in cache.layers]
        before = [layer[there] for layer in layers]
        size = self.shape.block_bytes
        wanted, coded = self._samples(len(ids), seed=1)
        other, other_coded = self._samples(len(ids), seed=2)
        memory = mmap.mmap(-1, 2 * len(ids) * size)

        def holds(bytes_of: npt.NDArray[np.uint8]) -> bool:
            return all(
                np.array_equal(layer[there].cpu().numpy().reshape(len(ids), -1), bytes_of[:, number])
                for number, layer in enumerate(layers)
            )

        arena = memoryview(memory)
        guard = copier.mapped(arena)
        copier.wait_pinned(_PIN_S)
        found = np.frombuffer(arena, np.uint8).reshape(2, *coded.shape)
        try:
            found[0] = coded
            loaded = copier.blocks(ids)
            loaded.read_arena(arena, np.arange(len(ids)) * size, 0, 0, self.shape.layers)
            loaded.drain()
            good = holds(wanted)
            stored = copier.blocks(ids)
            stored.write_arena(arena, np.arange(len(ids), 2 * len(ids)) * size)
            stored.drain()
            good = good and np.array_equal(found[1], coded)
            # through memory that is not pinned, like blocks from other sources
            loaded = copier.blocks(ids)
            for block in range(len(ids)):
                (piece,) = loaded.segments(block, 0, self.shape.layers)
                piece[:] = other_coded[block].tobytes()
            loaded.host_copy_ready(np.arange(len(ids)), 0, self.shape.layers)
            loaded.drain()
            good = good and holds(other)
            good = good and np.array_equal(copier.blocks(ids).gather().reshape(other_coded.shape), other_coded)
        finally:
            for layer, was in zip(layers, before, strict=True):
                layer[there] = was
            del found
            if guard.close():
                arena.release()
                memory.close()
            else:
                _kept.append(arena)  # the device may still access it
        if not good:
            raise Internal(
                "copies to and from this device return wrong bytes: try another strategy",
                device=cache.device,
                strategy=copier.strategy,
            )
        self._tried = {name: count for name, count in self.counts().items() if name.endswith("_bytes")}
        _log.info("copies tested: %s (strategy=%s)", cache.device, copier.strategy)

    def _samples(self, blocks: int, seed: int) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
        """Return random rows, uint8 ``[blocks, layers, row_bytes]``, and the layer blocks that the store keeps of them."""
        cache, codec = self._copier.cache, self._copier.codec
        rows = np.random.default_rng(seed).integers(0, 256, (blocks * self.shape.layers, cache.row_bytes), np.uint8)
        coded = rows
        if codec is not None:
            encoded = codec.encode(torch.from_numpy(rows).to(cache.device))
            rows, coded = codec.decode(encoded).cpu().numpy(), encoded.cpu().numpy()
        return rows.reshape(blocks, self.shape.layers, -1), coded.reshape(blocks, self.shape.layers, -1)


def _whole_pages(tensor: torch.Tensor, num_blocks: int) -> torch.Tensor:
    """Return a layer as ``[blocks, …]``, with the kernel's pages of each block combined."""
    each = pages_per_block(tensor, num_blocks)
    return tensor if each == 1 else tensor.unflatten(0, (num_blocks, each))


__all__ = ["DevicePages", "device_pages", "make_pages"]
