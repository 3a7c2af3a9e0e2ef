"""Tokenizer of the prefix explorer, so that people can paste the text of a prompt in place of token ids."""

from __future__ import annotations

import asyncio
import importlib
import logging
from pathlib import Path
from typing import Any, Final

from kvstore.control_api.schemas.store import MAX_TOKENS
from kvstore.core.errors import CapacityExceeded, InvalidArgument, Unsupported, install_command

logger = logging.getLogger(__name__)

FILE: Final = "tokenizer.json"
"""Name of the file in the folder of a model."""


class PromptTokenizer:
    """A tokenizer from a local file, loaded when it is first used. Bound to one event loop.

    It encodes one text at a time, because a long text keeps the processor busy for seconds and cannot be cancelled.

    Args:
        path: a ``tokenizer.json``, or the folder of a model that contains one; None: not configured.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._running: asyncio.Future[list[int]] | None = None
        self._loaded: Any = None

    @property
    def configured(self) -> bool:
        """Whether texts can be looked up."""
        return self._path is not None

    async def encode(self, text: str) -> list[int]:
        """Token ids of a prompt, with the special tokens that the tokenizer adds.

        Raises:
            Unsupported: no tokenizer is configured, or the library ``tokenizers`` is not installed.
            InvalidArgument: the file does not exist or is not a tokenizer, or the prompt has more than ``MAX_TOKENS`` tokens.
            CapacityExceeded: another text is being encoded.
        """
        if self._path is None:
            raise Unsupported("no tokenizer is configured: set admin.tokenizer, or give token ids")
        if self._running is not None and not self._running.done():
            raise CapacityExceeded("the tokenizer is busy with another text; retry later")
        self._running = asyncio.ensure_future(asyncio.to_thread(self._encode, self._path, text))
        return await asyncio.shield(self._running)  # the thread continues if the request is cancelled

    def _encode(self, path: Path, text: str) -> list[int]:
        if self._loaded is None:
            self._loaded = _load(path)
        (encoding,) = self._loaded.encode_batch([text])  # unlike `encode`, it releases the interpreter lock
        if len(encoding) > MAX_TOKENS:
            raise InvalidArgument("the prompt has too many tokens", got=len(encoding), limit=MAX_TOKENS)
        return [int(token) for token in encoding.ids]


def _load(path: Path) -> Any:  # noqa: ANN401  # the library is optional
    try:
        library = importlib.import_module("tokenizers")
    except ImportError as error:
        raise Unsupported(f"admin.tokenizer requires the library tokenizers: {install_command('tokenizer')}") from error
    file = path / FILE if path.is_dir() else path
    try:
        loaded = library.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises plain Exception for a missing or malformed file
        raise InvalidArgument(f"admin.tokenizer {file} cannot be read: {error}") from error
    logger.info("tokenizer loaded: %s", file)
    return loaded
