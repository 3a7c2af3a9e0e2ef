"""The name of the weights that the engine's KV belongs to.

A new epoch begins with every reset of the connector's cache, and with every other reset of the engine's cache after which the
weights are found changed.

The first epoch has the name that the user gives (``weights_epoch``, or the content of ``weights_epoch_file``), or a digest of the
weights. A later one has the name in the file, or the digest of the changed weights, or a name that no other engine has.
"""

from __future__ import annotations

import logging
import uuid
from pathlib import Path
from typing import Protocol

from kvclient import InvalidArgument
from kvclient.engines.options import HookOptions

_log = logging.getLogger(__name__)
_MAX_BYTES = 256


class EpochOptions(Protocol):
    """The options that name epochs."""

    @property
    def hook(self) -> HookOptions:
        """Options common to all hooks."""

    @property
    def weights_epoch_file(self) -> str:
        """A file that names the epoch; empty: none."""


class WeightsEpoch:
    """The current epoch of one engine.

    Args:
        options: the name to begin with, if any.

    Raises:
        InvalidArgument: the file is missing, or contains no name.
    """

    def __init__(self, options: EpochOptions) -> None:
        self._options = options
        self.number = 0
        self.named = bool(options.weights_epoch_file or options.hook.weights_epoch)
        """Whether the user names the epochs."""
        self.name = self._read() if options.weights_epoch_file else options.hook.weights_epoch

    def begin(self, changed: str = "") -> None:
        """Begin a new epoch.

        Args:
            changed: digest of the weights, if they are known to have changed; empty: they may have.
        """
        self.number += 1
        before, self.name = self.name, f"{self._options.hook.weights_epoch}~{uuid.uuid4().hex}"
        if changed and not self.named:
            self.name = changed
        elif self._options.weights_epoch_file:
            try:
                name = self._read()
            except InvalidArgument as error:
                _log.error("weights epoch not readable: nothing is shared until the next reset (error=%s)", error)
                return
            if not changed or name != before:  # the old name is not that of changed weights
                self.name = name

    def _read(self) -> str:
        path = Path(self._options.weights_epoch_file)
        try:
            with path.open("rb") as file:
                name = file.read(_MAX_BYTES + 1).decode().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidArgument("weights_epoch_file is not readable", file=str(path), error=error) from error
        if not name or len(name) > _MAX_BYTES:
            raise InvalidArgument("weights_epoch_file contains no name of at most 256 bytes", file=str(path), bytes=len(name))
        return name
