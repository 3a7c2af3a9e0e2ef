"""The content of a request's ``kv_transfer_params``, on which a router and two engines must agree.

A router that chose a prefill and a decode engine sends requests to both, at once or in sequence:

* the prefill engine: the request with ``max_tokens`` 1, and
  ``{"do_remote_decode": true, "transfer_id": ID, "decode_node": NODE}``; NODE is the store's node on the decode engine's host;
* the decode engine: the unchanged request, and ``{"do_remote_prefill": true, "transfer_id": ID}``.

ID is any name of up to 64 characters, a new one for each attempt. The prefix is read over the storage links of both hosts;
``"path_policy": NAME`` may choose for this request, see ``request_paths``. The prefill engine's answer contains the
parameters for the decode engine, for routers that send the requests in sequence. ``"do_remote_prefill": false`` in it means that
the prompt could not be handed over, and ``"namespace"`` names the namespace of what was: a decode engine with other pages (other
weights, another tensor-parallel size) does not wait for it. Unknown fields are ignored: they may belong to other components.

The fields come from clients and are not trusted. Invalid fields are ignored, and the request is served without them. They never
raise an error that could stop an engine.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np

from kvclient import BlockKey, InvalidArgument
from kvclient.engines.vllm.request_paths import NODE

_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")


class Role(StrEnum):
    """This engine's role in a request."""

    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True)
class Transfer:
    """One attempt to prefill on one engine and decode on another.

    Attributes:
        role: role of this engine.
        transfer_id: id of the attempt.
        decode_node: the store's node on the decode engine's host; only the prefill engine knows it.
        namespace: of the chain that the prefill engine hands over, in hex; empty: not known.
    """

    role: Role
    transfer_id: str
    decode_node: str = ""
    namespace: str = ""

    def tail_key(self, key: BlockKey) -> BlockKey:
        """The key of the partial last block of this attempt, unique so that no other request consumes the block."""
        mask = hashlib.sha256(self.transfer_id.encode()).digest()[: len(key)]
        return BlockKey((np.frombuffer(key, np.uint8) ^ np.frombuffer(mask, np.uint8)).tobytes())

    def for_decode(self, namespace: bytes | None) -> dict[str, Any]:
        """Return the parameters for the decode engine.

        Args:
            namespace: of the chain that was handed over; None: the prompt was not handed over and must not be awaited.
        """
        params: dict[str, Any] = {
            "do_remote_prefill": bool(namespace),
            "do_remote_decode": False,
            "transfer_id": self.transfer_id,
        }
        return params | {"namespace": namespace.hex()} if namespace else params

    def can_come_to(self, namespace: bytes) -> bool:
        """Whether the prompt can be handed over to an engine whose chain has this namespace, as far as is known."""
        return not self.namespace or self.namespace == namespace.hex()


def read_transfer(params: object) -> Transfer | None:
    """Return the transfer that a request belongs to, if any.

    Raises:
        InvalidArgument: the request names a transfer with invalid fields.
    """
    if not isinstance(params, Mapping):
        return None
    sends, receives = params.get("do_remote_decode") is True, params.get("do_remote_prefill") is True
    if not sends and not receives:
        return None
    if sends and receives:
        raise InvalidArgument("do_remote_prefill and do_remote_decode exclude each other")
    transfer_id = params.get("transfer_id")
    if not isinstance(transfer_id, str) or not _ID.fullmatch(transfer_id):
        rule = "transfer_id must be 1 to 64 letters, digits, dots, dashes and underscores"
        raise InvalidArgument(rule, got=_shown(transfer_id))
    if receives:
        namespace = params.get("namespace", "")
        return Transfer(Role.DECODE, transfer_id, namespace=namespace if isinstance(namespace, str) else "")
    node = params.get("decode_node")
    if not isinstance(node, str) or not NODE.fullmatch(node):
        raise InvalidArgument("decode_node must be the id of a node of the store", got=_shown(node))
    return Transfer(Role.PREFILL, transfer_id, node)


def _shown(value: object) -> str:
    """The beginning of an invalid string, or the type of another value, for an error."""
    return repr(value[:64]) if isinstance(value, str) else type(value).__name__


def not_handed_over(params: object) -> dict[str, Any] | None:
    """Return the parameters for the decode engine of a prompt that was served without the transfer it was to have.

    None: no transfer was asked for. The reason may be weights that are not identified, or have changed meanwhile.
    """
    with suppress(InvalidArgument):  # counted when the request came
        transfer = read_transfer(params)
        if transfer is not None and transfer.role is Role.PREFILL:
            return transfer.for_decode(None)
    return None
