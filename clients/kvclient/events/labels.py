"""Labels of blocks, which add the engine's knowledge for routers that index blocks by tokens.

A label has the engine's block hashes, the tokens, and the other inputs of the hashes. Labels are themselves blocks of the store,
in a *label namespace*, whose layout names the namespaces of the labelled blocks. So they are stored, replicated, evicted and made
durable as all blocks are, and a tenant's labels are its own. ``LabelWriter`` writes them; ``kvstore events`` reads them.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from kvclient.events.block_groups import GroupBlockId, xor
from kvstore.core import limits
from kvstore.core.errors import InvalidArgument
from kvstore.core.spec import CacheSpec
from kvstore.core.types import BlockKey, NamespaceId

MAIN_KINDS: Final = frozenset({"full_attention", "mla_attention", "sink_full_attention"})
"""vLLM's kinds of KV cache groups that hold every block of a prefix. Routers index these."""

_MAGIC: Final = b"KVLB"
_HEADER: Final = struct.Struct("<4sIHHHIH")
"""Magic, position, number of hashes, bytes of each hash, bytes of the parent's hash, number of tokens, bytes of the rest."""
_LAYOUT: Final = "block-labels"
_VERSION: Final = "1"
_ID_CHARS: Final = 16
"""Hexadecimal digits of a namespace in a layout."""
_ENGINE_HASH: Final = re.compile(r"[a-z0-9_-]{1,64}")
_MOST_SHOWN: Final = 64
_MAX_HASH_BYTES: Final = 64
_EXTRA_BYTES: Final = 512
"""Space for adapter, images and salt of one block."""
_ALIGNMENT: Final = 512
_MAX_DEPTH: Final = 4
"""Nesting of extra keys."""
_MAX_LABEL_BYTES: Final = 1 << 20
"""Anybody may register a namespace that looks like one of labels. Larger labels are not read."""


@dataclass(frozen=True, slots=True)
class BlockLabel:
    """One block, as its engine knows it.

    Attributes:
        position: of the block in its chain.
        hashes: the engine's block hashes, oldest first; several if a block of the store is several of the engine's.
        parent: the engine's hash of the block before; empty: head of a chain.
        tokens: token ids as uint32 little-endian, the same number for each hash.
        lora_name: the adapter; empty: none.
        extra_keys: other inputs of each hash, as vLLM's events have it; None: nothing.
    """

    position: int
    hashes: tuple[bytes, ...]
    parent: bytes
    tokens: bytes
    lora_name: str = ""
    extra_keys: tuple[Any, ...] | None = None

    def encode(self, size: int) -> bytes:
        """Return the label as a block of ``size`` bytes.

        Raises:
            InvalidArgument: it does not fit.
        """
        try:
            rest = json.dumps([self.lora_name, self.extra_keys], separators=(",", ":")).encode()
            if self.lora_name == "" and self.extra_keys is None:
                rest = b""
            length = len(self.hashes[0])
            if any(len(one) != length for one in self.hashes) or max(length, len(self.parent)) > _MAX_HASH_BYTES:
                raise InvalidArgument("hashes of a label must have equal lengths", limit=_MAX_HASH_BYTES)
            sizes = len(self.hashes), length, len(self.parent), len(self.tokens) // 4, len(rest)
            packed = _HEADER.pack(_MAGIC, self.position, *sizes) + b"".join((*self.hashes, self.parent, self.tokens, rest))
        except (IndexError, TypeError, ValueError, struct.error) as error:
            raise InvalidArgument("a label cannot be encoded", reason=error) from error
        if len(packed) > size:
            raise InvalidArgument("a label is too long", bytes=len(packed), limit=size)
        return packed.ljust(size, b"\0")

    @classmethod
    def decode(cls, block: bytes) -> BlockLabel:
        """Return the label in a block.

        Raises:
            InvalidArgument: the block is not a label.
        """
        try:
            magic, position, count, length, parent_length, tokens, rest_length = _HEADER.unpack_from(block)
            at = _HEADER.size
            ends = [at + count * length, parent_length, tokens * 4, rest_length]
            for index in range(1, 4):
                ends[index] += ends[index - 1]
            sizes_fit = 0 < length <= _MAX_HASH_BYTES and parent_length in (0, length) and ends[-1] <= len(block)
            if magic != _MAGIC or not count or not tokens or tokens % count or not sizes_fit:
                raise InvalidArgument("the block is not a label")
            hashes = tuple(block[one : one + length] for one in range(at, ends[0], length))
            lora_name, extra_keys = json.loads(block[ends[2] : ends[3]]) if rest_length else ("", None)
            if not isinstance(lora_name, str) or len(lora_name.encode()) > limits.MAX_NAME_BYTES:
                raise InvalidArgument("the block is not a label")
            if extra_keys is not None and not (
                isinstance(extra_keys, list) and len(extra_keys) == count and all(map(_is_publishable, extra_keys))
            ):
                raise InvalidArgument("the block is not a label")
        except (struct.error, ValueError, TypeError, RecursionError) as error:
            raise InvalidArgument("the block is not a label", reason=error) from error
        extras = None if extra_keys is None else tuple(extra_keys)
        return cls(position, hashes, block[ends[0] : ends[1]], block[ends[1] : ends[2]], lora_name, extras)


@dataclass(frozen=True, slots=True)
class LabelNamespace:
    """A namespace of labels.

    Attributes:
        spec: the namespace.
        labelled: the namespaces that hold the parts of a labelled block.
        engine_hash: algorithm and seed of the engine's hashes, such as ``sha256``. Chains of different hashes must not mix.
        kind: vLLM's kind of the KV cache group; empty: not one of those that routers index.
    """

    spec: CacheSpec
    labelled: tuple[NamespaceId, ...]
    engine_hash: str
    kind: str = ""

    def key(self, block: GroupBlockId) -> BlockKey:
        """Return the key of a block's label."""
        return BlockKey(xor(block, self.spec.namespace))

    @classmethod
    def make(cls, specs: Sequence[CacheSpec], *, engine_hash: str, kind: str = "", hashes: int = 1) -> LabelNamespace:
        """Return the namespace for labels of blocks whose parts are in the namespaces ``specs``.

        Args:
            specs: namespaces of all parts, equal in model, tenant and weights.
            engine_hash: algorithm and seed of the engine's hashes: lower-case letters, digits, ``_`` and ``-``.
            kind: vLLM's kind of the KV cache group.
            hashes: hashes of the engine per block.

        Raises:
            InvalidArgument: too many namespaces, or a malformed ``engine_hash``.
        """
        if not _ENGINE_HASH.fullmatch(engine_hash):
            raise InvalidArgument("the name of the engine's hash is malformed", engine_hash=engine_hash[:_MOST_SHOWN])
        labelled = tuple(dict.fromkeys(spec.namespace for spec in specs))
        kind = kind if kind in MAIN_KINDS else ""
        names = ",".join(one.hex()[:_ID_CHARS] for one in labelled)
        layout = f"{_LAYOUT}={_VERSION};hash={engine_hash};kind={kind};of={names}"
        if len(layout) > limits.MAX_NAME_BYTES:
            raise InvalidArgument("blocks in too many namespaces cannot be labelled", namespaces=len(labelled))
        first = specs[0]
        size = _HEADER.size + (hashes + 1) * _MAX_HASH_BYTES + 4 * first.block_tokens + _EXTRA_BYTES * hashes
        size += -size % _ALIGNMENT
        if size > _MAX_LABEL_BYTES:
            raise InvalidArgument("blocks with this number of tokens cannot be labelled", block_tokens=first.block_tokens)
        spec = replace(
            first, layers=1, layer_block_bytes=size, dtype="uint8", layout=layout, layout_version=1, shard_rank=0, shard_count=1
        )
        return cls(spec, labelled, engine_hash, kind)

    @classmethod
    def read(cls, spec: CacheSpec, known: Sequence[CacheSpec]) -> LabelNamespace | None:
        """Read a label namespace.

        Args:
            spec: the namespace.
            known: all namespaces.

        Returns:
            None: it is not one of labels, it names no hash or unknown namespaces, or these differ in tenant, weights or keys.
        """
        if spec.block_bytes > _MAX_LABEL_BYTES:
            return None
        parts = dict(part.partition("=")[::2] for part in spec.layout.split(";"))
        engine_hash = parts.get("hash", "")
        if parts.get(_LAYOUT) != _VERSION or not _ENGINE_HASH.fullmatch(engine_hash):
            return None
        names = parts.get("of", "").split(",")
        labelled = [one for one in known if one.namespace.hex()[:_ID_CHARS] in names and _owner(one) == _owner(spec)]
        if sorted(names) != sorted(one.namespace.hex()[:_ID_CHARS] for one in labelled):
            return None
        by_name = {one.namespace.hex()[:_ID_CHARS]: one.namespace for one in labelled}
        kind = parts.get("kind", "")
        return cls(spec, tuple(by_name[name] for name in names), engine_hash, kind if kind in MAIN_KINDS else "")


def _owner(spec: CacheSpec) -> tuple[object, ...]:
    """Return the fields that labels and labelled blocks have in common."""
    return spec.model, spec.tenant, spec.salt, spec.weights_epoch, spec.hash_algorithm, spec.block_tokens


def _is_publishable(value: object, depth: int = 0) -> bool:
    """Whether a value of a label can be encoded in an event."""
    if isinstance(value, str):
        return value.isascii() or value.encode(errors="replace").decode() == value
    if isinstance(value, list):
        return depth < _MAX_DEPTH and all(_is_publishable(one, depth + 1) for one in value)
    return value is None or isinstance(value, bool | float) or (isinstance(value, int) and -(1 << 63) <= value < 1 << 64)
