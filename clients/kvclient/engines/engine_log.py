"""Log lines of the hooks in the format of their engine."""

from __future__ import annotations

import logging

_OURS = ("kvclient", "kvstore")


def share_handlers(engine: logging.Logger) -> None:
    """Send the store's log lines to the handlers of an engine's logger, at its level.

    Engines such as vLLM configure their own logger only. Without this, Python prints our warnings as bare text, and nothing else.
    Nothing changes if the application has configured logging (the root logger or ours has a handler), or if the engine has not.

    Args:
        engine: the engine's logger, configured.
    """
    if not engine.handlers or logging.getLogger().handlers:
        return
    for ours in map(logging.getLogger, _OURS):
        if not ours.handlers:
            ours.handlers = list(engine.handlers)
            ours.setLevel(engine.level)
            ours.propagate = False
