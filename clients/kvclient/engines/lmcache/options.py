"""Options of the adapter: LMCache's ``adapter_params``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from kvclient import InvalidArgument
from kvclient.engines.options import HookOptions

_BOUNDS = {"workers": (1, 64), "max_pending": (1, 65_536), "chunk_tokens": (1, 65_536), "max_known_keys": (1, 10_000_000)}
_OWN = (*_BOUNDS, "object_bytes", "usage_check_s")
_ELSEWHERE = {
    "model": "LMCache's keys name the model",
    "hash_algorithm": "keys are always SHA-256",
    "require_store": "LMCache names its models only with its first task",
}
_MOST_SIZES = 16
_MOST_CHECK_S = 86_400.0


@dataclass(frozen=True, slots=True)
class AdapterOptions:
    """Options of the adapter.

    Attributes:
        hook: options common to all hooks.
        workers: threads for loads, as many for stores, and as many for lookups.
        max_pending: tasks of one kind that may wait or run; one more fails at once.
        chunk_tokens: LMCache's ``--chunk-size``, for the store's statistics. Part of the namespace.
        object_bytes: sizes of objects without dtype and shape, such as those of LMCache's own benchmark. Others of this kind are
            skipped: LMCache's ``serde`` makes them, and does not say how it encodes.
        max_known_keys: keys that are counted and listed; the oldest are forgotten.
        usage_check_s: time between two checks whether known keys are still stored.
    """

    hook: HookOptions = field(default_factory=HookOptions)
    workers: int = 4
    max_pending: int = 256
    chunk_tokens: int = 256
    object_bytes: tuple[int, ...] = ()
    max_known_keys: int = 100_000
    usage_check_s: float = 30.0

    def __post_init__(self) -> None:
        for name, (least, most) in _BOUNDS.items():
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
                raise InvalidArgument(
                    "the option must be an integer in its range", option=name, value=value, least=least, most=most
                )
        sizes = self.object_bytes
        if not isinstance(sizes, tuple) or len(sizes) > _MOST_SIZES or any(type(size) is not int or size < 1 for size in sizes):
            raise InvalidArgument("the option must be a list of sizes in bytes", option="object_bytes", most=_MOST_SIZES)
        seconds = self.usage_check_s
        if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds <= _MOST_CHECK_S:
            raise InvalidArgument("the option is out of its range", option="usage_check_s", value=seconds, most=_MOST_CHECK_S)

    @classmethod
    def from_params(cls, params: object) -> Self:
        """Read the options.

        Raises:
            InvalidArgument: an unknown key, or a value of the wrong type or range.
        """
        if not isinstance(params, Mapping):
            raise InvalidArgument("adapter_params must be a mapping of options", got=type(params).__name__)
        given: dict[str, Any] = dict(params)
        for name, why in _ELSEWHERE.items():
            if name in given:
                raise InvalidArgument(f"remove this option: {why}", option=name)
        hook = HookOptions.from_mapping(given, known_elsewhere=_OWN)
        if not hook.metadata:
            raise InvalidArgument("lookups require a metadata server", option="metadata")
        own = {name: given[name] for name in _OWN if name in given}
        if isinstance(own.get("object_bytes"), list):
            own["object_bytes"] = tuple(own["object_bytes"])
        made = cls(hook=hook, **own)
        if not hook.weights_epoch:
            raise InvalidArgument(
                "LMCache's keys do not identify weights: set a name, and another one after each update", option="weights_epoch"
            )
        return made
