"""Handle of a store that runs in the background."""

from __future__ import annotations

from kvclient.call.handle import CallHandle
from kvclient.results import StoreResult


class StoreHandle(CallHandle[StoreResult]):
    """A store that runs in the background, as ``KVClient.start_store`` returns it.

    Example::

        with client.start_store(keys, pages) as handle:
            ...                                  # the engine continues; it must not write to the pages
            if engine_needs_the_pages:
                handle.cancel()                  # returns soon, after the last read of the pages
            stored = handle.result().held_blocks
    """
