"""Options of the HiCache backend: the common hook options and its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self

from kvclient import InvalidArgument
from kvclient.engines.options import HookOptions

_ENGINES = (
    "backend_name",
    "module_path",
    "class_name",
    "interface_v1",
    "allocator",
    "tp_lcm_size",
    "file_storage_path",
    "prefetch_threshold",
    "prefetch_timeout_base",
    "prefetch_timeout_per_ki_token",
    "hicache_storage_pass_prefix_keys",
)
"""Keys of ``--hicache-storage-backend-extra-config`` that SGLang itself reads or adds. Decode servers pass on the last four."""


@dataclass(frozen=True, slots=True)
class BackendOptions:
    """The options in ``--hicache-storage-backend-extra-config``.

    Attributes:
        hook: options common to all hooks. ``hash_algorithm`` is that of SGLang's page hashes.
        zero_copy: pages move between SGLang's host memory and the store without an extra copy (SGLang's ``interface_v1``).
        chained: pages are stored as chains, which is fast and requires ``hicache_storage_pass_prefix_keys``; otherwise each
            page is stored separately. Default: as ``zero_copy``, because SGLang passes prefixes only through its
            ``interface_v1``.
        mend_prefixes: with ``chained``: patch SGLang to report all pages before a batch; see ``engine_patches``.
        kv_cache_dtype: dtype of the cache, if it differs from SGLang's ``--kv-cache-dtype``.
    """

    hook: HookOptions = field(default_factory=HookOptions)
    zero_copy: bool = False
    chained: bool = False
    mend_prefixes: bool = True
    kv_cache_dtype: str = ""

    @classmethod
    def from_mapping(cls, given: Mapping[str, Any]) -> Self:
        """Parse the extra configuration that SGLang passes to the backend.

        Raises:
            InvalidArgument: an unknown key or an invalid value.
        """
        own = {"chained": bool, "mend_prefixes": bool, "kv_cache_dtype": str}
        hook = HookOptions.from_mapping(given, known_elsewhere=(*_ENGINES, *own))
        for name, kind in own.items():
            if name in given and not isinstance(given[name], kind):
                raise InvalidArgument(
                    "the option has the wrong type", option=name, wants=kind.__name__, got=type(given[name]).__name__
                )
        zero_copy = bool(given.get("interface_v1", 0))
        chosen = {"chained": zero_copy, **{name: given[name] for name in own if name in given}}
        return cls(replace(hook, hash_algorithm="sha256-128"), zero_copy, **chosen)
