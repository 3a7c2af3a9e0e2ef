"""Sleep mode: vLLM unmaps its KV cache in a running worker, and maps it again at the same addresses. No vLLM types.

Copies of the store run in threads and on streams that vLLM does not know. A copy into unmapped memory is an illegal access, after
which the device fails for the whole process. vLLM lacks a hook before it unmaps, so the allocator's own calls are guarded: they
first wait until no copy is under way, and fail if copies do not end.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from functools import wraps
from typing import Any, Protocol

from kvclient import InvalidArgument

_log = logging.getLogger(__name__)

SUSPEND_S = 30.0
"""Longer than a copy takes until its device counts as hung."""
_KV_CACHE = "kv_cache"
"""vLLM's tag of the KV cache in its allocator."""
_BACKEND = "cumem"
"""The only backend of sleep mode whose unmapping can be guarded: others stop the process."""


class SleepListener(Protocol):
    """What must stop before the KV cache is unmapped: ``WorkerConnector``."""

    def suspend(self, timeout_s: float) -> None:
        """Return when nothing accesses the KV cache; raise if that does not happen in time."""

    def resume(self) -> None:
        """Use the KV cache again."""


def may_sleep(model_config: Any) -> bool:  # noqa: ANN401
    """Return whether this engine may unmap its KV cache.

    Args:
        model_config: vLLM's ``ModelConfig``.

    Raises:
        InvalidArgument: it may, by a backend of sleep mode whose unmapping cannot be guarded.
    """
    if not (getattr(model_config, "enable_sleep_mode", False) or getattr(model_config, "enable_cumem_allocator", False)):
        return False
    backend = getattr(model_config, "sleep_mode_backend", _BACKEND)
    if backend != _BACKEND:
        raise InvalidArgument(
            "this backend of sleep mode is not supported with a KV cache on a device: use cumem, or no sleep mode",
            sleep_mode_backend=backend,
        )
    return True


def guard_sleep(allocator: Any, sleeper: SleepListener) -> Callable[[], None]:  # noqa: ANN401
    """Let an allocator unmap the KV cache only after the copies of the store have ended.

    Args:
        allocator: vLLM's allocator of this process: ``sleep``, ``discard`` and ``wake_up`` are replaced.
        sleeper: stops and restarts the copies.

    Returns:
        A function that restores the allocator.

    Raises:
        InvalidArgument: the allocator lacks one of these methods.
    """
    names = ("sleep", "discard", "wake_up")
    missing = [name for name in names if not callable(getattr(allocator, name, None))]
    if missing:
        raise InvalidArgument(
            "sleep mode of this vLLM is not supported with a KV cache on a device: leave out --enable-sleep-mode",
            missing=", ".join(missing),
        )
    sleep, discard, wake_up = (getattr(allocator, name) for name in names)

    @wraps(sleep)
    def guarded_sleep(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        sleeper.suspend(SUSPEND_S)
        _log.info("copies suspended: the engine sleeps")
        return sleep(*args, **kwargs)

    @wraps(discard)
    def guarded_discard(tags: str | Collection[str], *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        if _KV_CACHE in _as_tags(tags):
            sleeper.suspend(SUSPEND_S)
            _log.info("copies suspended: the engine discards its KV cache")
        return discard(tags, *args, **kwargs)

    @wraps(wake_up)
    def guarded_wake_up(tags: Sequence[str] | None = None, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        result = wake_up(tags, *args, **kwargs)
        if tags is None or _KV_CACHE in _as_tags(tags):
            sleeper.resume()
            _log.info("copies resumed: the engine has its KV cache again")
        return result

    guards = dict(zip(names, (guarded_sleep, guarded_discard, guarded_wake_up), strict=True))
    for name, guard in guards.items():
        setattr(allocator, name, guard)

    def restore() -> None:
        for name, guard in guards.items():
            if allocator.__dict__.get(name) is guard:
                delattr(allocator, name)

    return restore


def _as_tags(tags: str | Collection[str]) -> Collection[str]:
    return (tags,) if isinstance(tags, str) else tags
