"""The transformers hook: ``generate`` starts from the longest stored prefix and stores the KV that it computes.

    from kvclient.engines.transformers import PrefixStore

    with PrefixStore.connect(model, metadata="127.0.0.1:7400") as store:
        output = store.generate(**tokenizer(prompt, return_tensors="pt"), max_new_tokens=100)

See ``README.md`` beside this file. Importing this package loads neither torch nor transformers.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvclient.engines.transformers.cache import StoredCache
    from kvclient.engines.transformers.prefix_store import PrefixStore

_HOMES = {
    "PrefixStore": "kvclient.engines.transformers.prefix_store",
    "StoredCache": "kvclient.engines.transformers.cache",
}

__all__ = ["PrefixStore", "StoredCache"]


def __getattr__(name: str) -> object:
    """Import the module of a public name on first use."""
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} lacks the attribute {name!r}")
    return getattr(import_module(home), name)
