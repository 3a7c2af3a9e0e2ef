"""Pages of a KV cache on a device: ``DeviceCopier`` moves them, on streams of its own, and this says in which order.

* What a step computed is read behind a mark that the engine's thread made once the step had been asked for.
* What is loaded is written behind such a mark, too: whoever had the page before may still be computed with.
* A layer that was loaded is used behind its copy: the engine's stream waits for it, not its thread (``LoadHandle.wait_layer``). A
  load outside of the batch has ended only when its copies have.
* Copies that do not end come before whatever is asked of the device next: ``clear``.

This module imports torch, which a vLLM worker has loaded long ago.
"""

from __future__ import annotations

import logging
import mmap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from kvclient import BlockBuffer, BlockShape, CacheSpec, InvalidArgument
from kvclient.device import DeviceCopier, PagedCache
from kvclient.device.streams import CudaDevice, Device
from kvclient.engines.vllm.memory.pages import LAYOUTS, GroupPages, Mark, Pages, pages_per_block
from kvstore.core.errors import Internal

if TYPE_CHECKING:
    from kvclient.device.copier import StrategyName
    from kvclient.device.streams import Event

_log = logging.getLogger(__name__)
_COUNTED = (
    "device_loaded_bytes",
    "device_stored_bytes",
    "device_unpinned_bytes",
    "device_errors",
    "device_lost",
    "device_pin_refused",
    "device_pin_retries",
    "device_batch_refused",
    "device_without_triton",
)
"""Of the copier's counters those that are the connector's, too."""
_TRIED_PAGES = 3
_PIN_S = 30.0
_kept: list[memoryview] = []


def make_pages(
    groups: Sequence[Sequence[torch.Tensor]], num_blocks: int, *, strategy: StrategyName, staging_bytes: int
) -> list[Pages]:
    """The pages of an engine, by group, wherever they lie.

    Args:
        groups: by group: one tensor a layer.
        num_blocks: blocks of the block manager.
        strategy: the way copies to a device go; see ``kvclient.device.copy_strategies``.
        staging_bytes: of each staging buffer on a device.

    Raises:
        InvalidArgument: memory that is neither the host's nor a CUDA device's, or a layout that is not known.
        Unavailable: a CUDA device without its driver.
        Internal: copies on the device do not bring what they should.
    """
    places = {tensor.device for group in groups for tensor in group}
    if {place.type for place in places} == {"cpu"}:
        return [GroupPages(group, num_blocks) for group in groups]
    if len(places) != 1 or next(iter(places)).type != "cuda":
        raise InvalidArgument(
            "a KV cache lies in host memory or on one CUDA device", devices=", ".join(sorted(str(place) for place in places))
        )
    return device_pages(groups, num_blocks, CudaDevice(next(iter(places))), strategy=strategy, staging_bytes=staging_bytes)


def device_pages(
    groups: Sequence[Sequence[torch.Tensor]], num_blocks: int, device: Device, *, strategy: StrategyName, staging_bytes: int
) -> list[Pages]:
    """The same, on a device that is told; each group's copies are tried out before any is relied on."""
    pages = [DevicePages(group, num_blocks, device, strategy=strategy, staging_bytes=staging_bytes) for group in groups]
    for one in pages:
        one.try_out()
    return list(pages)


class DevicePages:
    """The pages of one KV cache group on a device; see ``Pages``.

    Args:
        tensors: one a layer, in layer order: ``[blocks, …]``, or ``[blocks * n, …]`` where kernels use smaller pages than the
            engine's block manager.
        num_blocks: blocks of the block manager.
        device: where they lie.
        strategy: the way copies go.
        staging_bytes: of each staging buffer.

    Raises:
        InvalidArgument: a layout that is not known, or a strategy that this device does not have.
    """

    def __init__(
        self, tensors: Sequence[torch.Tensor], num_blocks: int, device: Device, *, strategy: StrategyName, staging_bytes: int
    ) -> None:
        try:
            cache = PagedCache([_whole_pages(tensor, num_blocks) for tensor in tensors])
        except InvalidArgument as error:
            raise InvalidArgument(
                "this layout of the KV cache is not supported",
                reason=error,
                shape=tuple(tensors[0].shape),
                strides=tensors[0].stride(),
                supported=f"[blocks, heads, tokens, content] as {LAYOUTS} have it, a tensor a layer, all layers of a group alike",
            ) from error
        self._copier = DeviceCopier(cache, strategy=strategy, staging_bytes=staging_bytes, device=device)
        self.num_blocks = num_blocks
        self.shape: BlockShape = self._copier.shape
        self._tried: dict[str, int] = {}
        """What trying out was counted as."""

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

    def wait_pinned(self, timeout_s: float) -> bool:
        return self._copier.wait_pinned(timeout_s)

    def counts(self) -> Mapping[str, int]:
        totals = self._copier.counters.snapshot()
        return {name: totals.get(f"{name}_total", 0) - self._tried.get(name, 0) for name in _COUNTED}

    def try_out(self) -> None:
        """Copies a few pages there and back, the way all will go, before any is relied on: no GPU may be what it seems.

        The pages are as before; nothing may use them meanwhile.

        Raises:
            Internal: other bytes came, or none.
        """
        cache, copier = self._copier.cache, self._copier
        ids = sorted({0, self.num_blocks // 2, self.num_blocks - 1})[:_TRIED_PAGES]
        there = torch.tensor(ids, device=cache.device)
        layers = [layer.words(1) for layer in cache.layers]
        before = [layer[there] for layer in layers]
        size = self.shape.block_bytes
        wanted = np.random.default_rng(len(ids)).integers(0, 256, (len(ids), self.shape.layers, cache.row_bytes), np.uint8)
        memory = mmap.mmap(-1, 2 * len(ids) * size)

        def holds(bytes_of: npt.NDArray[np.uint8]) -> bool:
            return all(
                np.array_equal(layer[there].cpu().numpy().reshape(len(ids), -1), bytes_of[:, number])
                for number, layer in enumerate(layers)
            )

        arena = memoryview(memory)
        guard = copier.mapped(arena)
        copier.wait_pinned(_PIN_S)
        found = np.frombuffer(arena, np.uint8).reshape(2, len(ids), self.shape.layers, cache.row_bytes)
        try:
            found[0] = wanted
            loaded = copier.blocks(ids)
            loaded.read_arena(arena, np.arange(len(ids)) * size, 0, 0, self.shape.layers)
            loaded.drain()
            good = holds(wanted)
            stored = copier.blocks(ids)
            stored.write_arena(arena, np.arange(len(ids), 2 * len(ids)) * size)
            stored.drain()
            good = good and np.array_equal(found[1], wanted)
            # by memory that is not pinned, as what comes from elsewhere goes
            other = ~wanted
            loaded = copier.blocks(ids)
            for block in range(len(ids)):
                (piece,) = loaded.segments(block, 0, self.shape.layers)
                piece[:] = other[block].tobytes()
            loaded.landed(np.arange(len(ids)), 0, self.shape.layers)
            loaded.drain()
            good = good and holds(other) and np.array_equal(copier.blocks(ids).gather().reshape(other.shape), other)
        except RuntimeError as error:  # torch's, of the device
            raise Internal("the device fails", device=cache.device, error=error) from error
        finally:
            for layer, was in zip(layers, before, strict=True):
                layer[there] = was
            del found
            if guard.close():
                arena.release()
                memory.close()
            else:
                _kept.append(arena)  # the device may still touch it
        if not good:
            raise Internal(
                "copies to and from this device bring other bytes: another strategy may not",
                device=cache.device,
                way=copier.strategy,
            )
        self._tried = {name: count for name, count in self.counts().items() if name.endswith("_bytes")}
        _log.info("copies between host memory and %s were tried out: %s", cache.device, copier.strategy)


def _whole_pages(tensor: torch.Tensor, num_blocks: int) -> torch.Tensor:
    """A layer as ``[blocks, …]``: the kernel's pages of a block in one."""
    each = pages_per_block(tensor, num_blocks)
    return tensor if each == 1 else tensor.unflatten(0, (num_blocks, each))


__all__ = ["DevicePages", "device_pages", "make_pages"]
