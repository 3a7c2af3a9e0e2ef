"""Memory of one device: lookup, sizing and allocation, with clear errors."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import torch

from kvstore.core.errors import CapacityExceeded, InvalidArgument, Unavailable

_log = logging.getLogger(__name__)

PAGE_BYTES = 4096
DEVICE_KINDS = ("cuda", "cpu")


def find_device(name: str) -> torch.device:
    """Parse the name of a device.

    Args:
        name: ``cuda:N``, ``cuda`` (the current one) or ``cpu``.

    Raises:
        InvalidArgument: an unknown name, or an index that this host does not have.
        Unavailable: this process has no access to a CUDA device.
    """
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError) as error:
        raise InvalidArgument("device must be cuda:N or cpu", device=name) from error
    if device.type not in DEVICE_KINDS or (device.type == "cpu" and device.index):
        raise InvalidArgument("device must be cuda:N or cpu", device=name)
    if device.type == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise Unavailable(
            "no CUDA device can be reached from this process: is there a GPU, a driver, and a torch built for CUDA?",
            device=name,
            torch=torch.__version__,
        )
    count = torch.cuda.device_count()
    index = torch.cuda.current_device() if device.index is None else device.index
    if not 0 <= index < count:
        raise InvalidArgument("no such CUDA device in this process; check CUDA_VISIBLE_DEVICES", device=name, devices=count)
    return torch.device("cuda", index)


def free_bytes(device: torch.device) -> int:
    """Bytes that could be allocated now."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):  # includes file caches, which the kernel reclaims
            return int(line.split()[1]) << 10
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def pool_bytes(device: torch.device, capacity_bytes: int | None, share: float | None) -> int:
    """Compute the size of a pool, in whole pages.

    Args:
        device: device of the pool.
        capacity_bytes: the size; or
        share: the size as a share of the free memory, above 0 and at most 1.

    Raises:
        InvalidArgument: neither or both are given, or an impossible value.
        CapacityExceeded: more than is free.
    """
    if (capacity_bytes is None) == (share is None):
        raise InvalidArgument("set exactly one of capacity_bytes and share", capacity_bytes=capacity_bytes, share=share)
    free = free_bytes(device)
    if share is not None:
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1:
            raise InvalidArgument("share must be above 0 and at most 1", share=share)
        capacity_bytes = int(free * share)
    if isinstance(capacity_bytes, bool) or not isinstance(capacity_bytes, int) or capacity_bytes < PAGE_BYTES:
        raise InvalidArgument("capacity_bytes must be at least 4096", capacity_bytes=capacity_bytes)
    capacity_bytes = capacity_bytes // PAGE_BYTES * PAGE_BYTES
    if capacity_bytes > free:
        raise _too_much(device, capacity_bytes, free)
    return capacity_bytes


def check_space(device: torch.device, capacity_bytes: int, held_bytes: int) -> None:
    """Check that a pool of another size may fit, before its blocks are evicted for it.

    Args:
        device: device of the pool.
        capacity_bytes: the new size.
        held_bytes: the current size, which is released first.

    Raises:
        CapacityExceeded: more than the free and released memory.
    """
    free = free_bytes(device) + held_bytes
    if capacity_bytes > free:
        raise _too_much(device, capacity_bytes, free)


def take(device: torch.device, nbytes: int) -> torch.Tensor:
    """Allocate memory: uint8 ``[nbytes]``, uninitialised.

    Raises:
        CapacityExceeded: the device refused.
    """
    try:
        taken = torch.empty(nbytes, dtype=torch.uint8, device=device)
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # other streams may still use the memory
    except (torch.OutOfMemoryError, RuntimeError) as error:
        # torch has a dozen messages for it
        _log.warning("device allocation failed: %s (bytes=%d, error=%s)", device, nbytes, error)
        raise _too_much(device, nbytes, None) from error
    return taken


kept: list[torch.Tensor] = []


def keep_for_process(memory: torch.Tensor) -> None:
    """Keep memory that a hung device may still access allocated for the life of the process."""
    if not any(memory is one for one in kept):
        kept.append(memory)


def give_back(device: torch.device) -> None:
    """Release torch's cached memory to the device, for other programs."""
    if device.type != "cuda":
        return
    try:
        torch.cuda.empty_cache()
    except RuntimeError as error:  # the device has failed
        _log.warning("device memory not released: %s (error=%s)", device, error)


def _too_much(device: torch.device, wanted: int, free: int | None) -> CapacityExceeded:
    return CapacityExceeded("not enough device memory for the pool; lower its size", device=device, bytes=wanted, free=free)
