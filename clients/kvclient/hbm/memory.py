"""Memory of one device: found, sized and taken, with a clear word where that fails."""

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
    """The device of a name.

    Args:
        name: ``cuda:N``, ``cuda`` (the current one) or ``cpu``.

    Raises:
        InvalidArgument: no such name, or an index that this host does not have.
        Unavailable: this process cannot reach any CUDA device.
    """
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError) as error:
        raise InvalidArgument("a device is cuda:N or cpu", device=name) from error
    if device.type not in DEVICE_KINDS or (device.type == "cpu" and device.index):
        raise InvalidArgument("a device is cuda:N or cpu", device=name)
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
        raise InvalidArgument("this process sees no such CUDA device (CUDA_VISIBLE_DEVICES?)", device=name, devices=count)
    return torch.device("cuda", index)


def free_bytes(device: torch.device) -> int:
    """Bytes that could be taken there now."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):  # caches of files count: they give way
            return int(line.split()[1]) << 10
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def pool_bytes(device: torch.device, capacity_bytes: int | None, share: float | None) -> int:
    """How large a pool is to be, in whole pages.

    Args:
        device: where.
        capacity_bytes: so much; or
        share: so much of what is free there now, above 0 and at most 1.

    Raises:
        InvalidArgument: neither or both are given, or an impossible one.
        CapacityExceeded: more than is free.
    """
    if (capacity_bytes is None) == (share is None):
        raise InvalidArgument("a pool is sized by capacity_bytes or by share", capacity_bytes=capacity_bytes, share=share)
    free = free_bytes(device)
    if share is not None:
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1:
            raise InvalidArgument("a share of free memory lies above 0 and at most at 1", share=share)
        capacity_bytes = int(free * share)
    if isinstance(capacity_bytes, bool) or not isinstance(capacity_bytes, int) or capacity_bytes < PAGE_BYTES:
        raise InvalidArgument("a pool takes at least a page of 4096 bytes", capacity_bytes=capacity_bytes)
    capacity_bytes = capacity_bytes // PAGE_BYTES * PAGE_BYTES
    if capacity_bytes > free:
        raise _too_much(device, capacity_bytes, free)
    return capacity_bytes


def check_room(device: torch.device, capacity_bytes: int, held_bytes: int) -> None:
    """That a pool of another size has a chance, before its blocks leave for it.

    Args:
        device: where.
        capacity_bytes: the size wanted.
        held_bytes: what it has now, which it gives back first.

    Raises:
        CapacityExceeded: more than is free and held.
    """
    free = free_bytes(device) + held_bytes
    if capacity_bytes > free:
        raise _too_much(device, capacity_bytes, free)


def take(device: torch.device, nbytes: int) -> torch.Tensor:
    """Takes memory: uint8 ``[nbytes]``, with nothing in particular in it.

    Raises:
        CapacityExceeded: the device does not give so much.
    """
    try:
        taken = torch.empty(nbytes, dtype=torch.uint8, device=device)
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # others may have used it on their streams until now
    except (torch.OutOfMemoryError, RuntimeError) as error:
        # torch words it in a dozen ways; whatever it is, this device did not give the memory
        _log.warning("%s does not give %d bytes: %s", device, nbytes, error)
        raise _too_much(device, nbytes, None) from error
    return taken


_left: list[torch.Tensor] = []


def leave(memory: torch.Tensor) -> None:
    """Memory that a device may touch for ever: kept for the life of the process, so that nobody else is given it."""
    if not any(memory is one for one in _left):
        _left.append(memory)


def give_back(device: torch.device) -> None:
    """Hands memory that no tensor has any more from torch's cache back to the device, for others than torch."""
    if device.type != "cuda":
        return
    try:
        torch.cuda.empty_cache()
    except RuntimeError as error:  # a device that has failed
        _log.warning("%s does not take its memory back: %s", device, error)


def _too_much(device: torch.device, wanted: int, free: int | None) -> CapacityExceeded:
    return CapacityExceeded("the device has not so much memory for a pool: take less", device=device, bytes=wanted, free=free)
