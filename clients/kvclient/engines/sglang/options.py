"""Options of the HiCache backend: those of every hook, and its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self

from kvclient import InvalidArgument
from kvclient.engines.options import HookOptions

_ENGINES = ("backend_name", "module_path", "class_name", "interface_v1", "allocator", "tp_lcm_size", "file_storage_path")
"""What SGLang itself reads, or leaves, in ``--hicache-storage-backend-extra-config``."""


@dataclass(frozen=True, slots=True)
class BackendOptions:
    """What ``--hicache-storage-backend-extra-config`` may hold.

    Attributes:
        hook: options common to all hooks. ``hash_algorithm`` is what SGLang's page hashes are.
        zero_copy: pages move between SGLang's host memory and the store without a copy between (SGLang's ``interface_v1``).
        chained: pages are stored as chains, which is fast and needs ``hicache_storage_pass_prefix_keys``; otherwise each page is
            stored by itself. Unless given, as ``zero_copy``, since SGLang tells prefixes to its ``interface_v1`` alone.
        mend_prefixes: with ``chained``: make SGLang tell all pages before what it asks for; see ``prefixes``.
        kv_cache_dtype: what the cache holds, where it is not what SGLang was started with (``--kv-cache-dtype``).
    """

    hook: HookOptions = field(default_factory=HookOptions)
    zero_copy: bool = False
    chained: bool = False
    mend_prefixes: bool = True
    kv_cache_dtype: str = ""

    @classmethod
    def from_mapping(cls, given: Mapping[str, Any]) -> Self:
        """Options from the extra configuration, as SGLang hands it to the backend.

        Raises:
            InvalidArgument: an unknown key, or a value that is no such thing.
        """
        own = {"chained": bool, "mend_prefixes": bool, "kv_cache_dtype": str}
        hook = HookOptions.from_mapping(given, known_elsewhere=(*_ENGINES, *own))
        for name, kind in own.items():
            if name in given and not isinstance(given[name], kind):
                raise InvalidArgument(
                    "the option takes another type", option=name, wants=kind.__name__, got=type(given[name]).__name__
                )
        zero_copy = bool(given.get("interface_v1", 0))
        chosen = {"chained": zero_copy, **{name: given[name] for name in own if name in given}}
        return cls(replace(hook, hash_algorithm="sha256-128"), zero_copy, **chosen)
