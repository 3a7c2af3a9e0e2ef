"""Which weights the engine's KV is of. Every reset of the engine's cache begins a new epoch: KV of other weights is never found.

A fixed name (``weights_epoch``) holds until the first reset; from then on it gets a suffix that no other engine has: nothing is
shared until the engine is started anew, or is told a name through ``weights_epoch_file``, which is read again at each reset.
"""

from __future__ import annotations

import logging
import uuid
from pathlib import Path

from kvclient import InvalidArgument
from kvclient.engines.vllm.options import ConnectorOptions

_log = logging.getLogger(__name__)
_MOST_BYTES = 256


class WeightsEpoch:
    """The epochs of one engine.

    Args:
        options: the name to begin with.

    Raises:
        InvalidArgument: the file is missing, or holds no name.
    """

    def __init__(self, options: ConnectorOptions) -> None:
        self._options = options
        self.number = 0
        self.name = self._read() if options.weights_epoch_file else options.hook.weights_epoch

    def advance(self) -> None:
        """The weights may have changed. Where the file cannot tell, it is as if there were none: rather nothing than stale KV."""
        self.number += 1
        self.name = f"{self._options.hook.weights_epoch}~{uuid.uuid4().hex}"
        if self._options.weights_epoch_file:
            try:
                self.name = self._read()
            except InvalidArgument as error:
                _log.error("%s: an epoch of this engine's own until the next reset", error)

    def _read(self) -> str:
        path = Path(self._options.weights_epoch_file)
        try:
            with path.open("rb") as file:
                name = file.read(_MOST_BYTES + 1).decode().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidArgument("the weights epoch cannot be read", file=str(path), error=error) from error
        if not name or len(name) > _MOST_BYTES:
            raise InvalidArgument("the file holds no weights epoch", file=str(path), bytes=len(name))
        return name
