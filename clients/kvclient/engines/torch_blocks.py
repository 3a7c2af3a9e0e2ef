"""Conversion between KV tensors and blocks of the store, for torch-based hooks and for custom models.

    layout = KVLayout.of(layers, block_tokens=64)                 # layers: [(keys, values), …], each [batch, heads, tokens, dim]
    client = KVClient.connect("127.0.0.1:7400", layout.spec("my-model"))
    client.store(client.keys(token_ids), export_blocks(layers, layout))

    memory = layout.allocate(lookup.hit_blocks)
    result = client.load(lookup, memory)
    layers = import_blocks(memory[: result.hit_blocks], layout)

A layer block is the keys of one layer, ``[heads, block_tokens, key_dim]``, then its values, ``[heads, block_tokens, value_dim]``,
both contiguous and in the dtype of the cache. Keys are copied as they are in the cache: with positions applied if the model
applies them before caching, as nearly all do. A block is valid only at its depth in its chain, which its key encodes.

This module imports torch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from kvclient import CacheSpec, InvalidArgument
from kvclient.engines.options import HookOptions

LAYOUT_VERSION = 1

KV = tuple[torch.Tensor, torch.Tensor]
"""Keys and values of one layer: ``[batch, heads, tokens, dim]``; number of heads and dim may differ between the two."""

_NAME_ROOM = 200
"""Maximum length of a layout's name. A longer name is replaced by its digest."""


@dataclass(frozen=True, slots=True)
class LayerShape:
    """Shape of one token in one layer: ``heads * dim`` elements of keys, and as many of values."""

    key_heads: int
    key_dim: int
    value_heads: int
    value_dim: int

    @classmethod
    def of(cls, keys: torch.Tensor, values: torch.Tensor) -> LayerShape:
        """Return the shape of a layer's cache.

        Raises:
            InvalidArgument: the tensors are not ``[batch, heads, tokens, dim]`` of one batch and one length.
        """
        if keys.ndim != 4 or values.ndim != 4 or keys.shape[0] != values.shape[0] or keys.shape[2] != values.shape[2]:
            raise InvalidArgument(
                "keys and values must be [batch, heads, tokens, dim], with equal batch and tokens",
                keys=tuple(keys.shape),
                values=tuple(values.shape),
            )
        return cls(keys.shape[1], keys.shape[3], values.shape[1], values.shape[3])

    @property
    def elements(self) -> int:
        """Elements per token."""
        return self.key_heads * self.key_dim + self.value_heads * self.value_dim

    @property
    def name(self) -> str:
        """Short, unambiguous name: ``2x64`` if keys and values have equal shapes, else ``1x512+1x64``."""
        keys, values = f"{self.key_heads}x{self.key_dim}", f"{self.value_heads}x{self.value_dim}"
        return keys if keys == values else f"{keys}+{values}"


@dataclass(frozen=True)
class KVLayout:
    """How the KV of a model is arranged in blocks. Immutable; equal layouts of equal models are interchangeable.

    Attributes:
        block_tokens: tokens per block.
        dtype: the dtype of every layer's cache.
        layers: the layers in order. If their shapes differ, a block is one opaque layer block of all layers in sequence.

    Raises:
        InvalidArgument: no layers, or a block of no tokens.
    """

    block_tokens: int
    dtype: torch.dtype
    layers: tuple[LayerShape, ...]

    def __post_init__(self) -> None:
        if not self.layers or self.block_tokens < 1 or any(layer.elements < 1 for layer in self.layers):
            raise InvalidArgument(
                "layers must not be empty, and block_tokens must be at least 1",
                layers=len(self.layers),
                block_tokens=self.block_tokens,
            )

    @classmethod
    def of(cls, layers: Sequence[KV], block_tokens: int) -> KVLayout:
        """Return the layout of an existing cache of any length.

        Args:
            layers: keys and values of each layer.
            block_tokens: tokens per block.

        Raises:
            InvalidArgument: layers of several dtypes, or tensors of the wrong shape.
        """
        dtypes = {tensor.dtype for pair in layers for tensor in pair}
        if len(dtypes) != 1:
            raise InvalidArgument("all layers must have the same dtype", dtypes=sorted(map(str, dtypes)))
        return cls(block_tokens, dtypes.pop(), tuple(LayerShape.of(*pair) for pair in layers))

    @cached_property
    def block_bytes(self) -> int:
        """Bytes per full block."""
        return sum(layer.elements for layer in self.layers) * self.block_tokens * self.dtype.itemsize

    @property
    def uniform(self) -> bool:
        """Whether all layers have the same shape, so that each is a layer block."""
        return len(set(self.layers)) == 1

    @property
    def dtype_name(self) -> str:
        """Name of the dtype in specs: ``float32``, ``bfloat16``."""
        return str(self.dtype).removeprefix("torch.")

    @property
    def name(self) -> str:
        """Name of the layout in a namespace."""
        shapes = self.layers[0].name if self.uniform else ",".join(layer.name for layer in self.layers)
        if len(shapes) > _NAME_ROOM:
            shapes = hashlib.sha256(shapes.encode()).hexdigest()[:32]
        return f"torch/{shapes}"

    def spec(self, model: str, options: HookOptions | None = None, extra_layout: str = "") -> CacheSpec:
        """Return the namespace.

        Args:
            model: name of the model; two models of equal name and shape would share KV.
            options: the hook's options; None: the defaults.
            extra_layout: anything else that changes the bytes of equal tokens.

        Raises:
            InvalidArgument: invalid values.
        """
        layers = len(self.layers) if self.uniform else 1
        return (options or HookOptions()).spec(
            model,
            block_tokens=self.block_tokens,
            layers=layers,
            layer_block_bytes=self.block_bytes // layers,
            dtype=self.dtype_name,
            layout=f"{self.name}/{extra_layout}" if extra_layout else self.name,
            layout_version=LAYOUT_VERSION,
        )

    def allocate(self, blocks: int) -> torch.Tensor:
        """Allocate uninitialized memory for blocks: uint8 ``[blocks, block_bytes]`` on the CPU."""
        return torch.empty((blocks, self.block_bytes), dtype=torch.uint8)

    def check(self, layers: Sequence[KV]) -> None:
        """Check tensors against the layout.

        Raises:
            InvalidArgument: wrong number of layers, shape or dtype.
        """
        if len(layers) != len(self.layers):
            raise InvalidArgument("the number of layers differs from the layout", got=len(layers), wants=len(self.layers))
        for number, (pair, shape) in enumerate(zip(layers, self.layers, strict=True)):
            got = LayerShape.of(*pair)
            if got != shape or any(tensor.dtype != self.dtype for tensor in pair):
                raise InvalidArgument(
                    "the shape or dtype of a layer differs from the layout",
                    layer=number,
                    got=got.name,
                    wants=shape.name,
                    dtype=pair[0].dtype,
                )

    def pieces(self, blocks: torch.Tensor) -> list[KV]:
        """Return views of blocks per layer: keys ``[blocks, heads, block_tokens, key_dim]`` and values. No bytes are copied.

        Args:
            blocks: uint8 ``[blocks, block_bytes]``, with any row stride that is a multiple of the dtype's size.

        Raises:
            InvalidArgument: the memory has another shape or alignment.
        """
        if blocks.dtype != torch.uint8 or blocks.ndim != 2 or blocks.shape[1] != self.block_bytes:
            raise InvalidArgument(
                "blocks must be uint8 [blocks, block_bytes]",
                shape=tuple(blocks.shape),
                dtype=blocks.dtype,
                block_bytes=self.block_bytes,
            )
        try:
            rows = blocks.view(self.dtype)
        except RuntimeError as error:  # torch's error for bytes that are not aligned for the dtype
            raise InvalidArgument("the memory of the blocks is not aligned for the dtype", dtype=self.dtype) from error
        pairs, at = [], 0
        for shape in self.layers:
            pair = []
            for heads, dim in ((shape.key_heads, shape.key_dim), (shape.value_heads, shape.value_dim)):
                size = heads * self.block_tokens * dim
                pair.append(rows[:, at : at + size].view(-1, heads, self.block_tokens, dim))
                at += size
            pairs.append((pair[0], pair[1]))
        return pairs


def export_blocks(
    layers: Sequence[KV],
    layout: KVLayout,
    *,
    row: int = 0,
    first_token: int = 0,
    blocks: int | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Copy full blocks out of a cache.

    Args:
        layers: keys and values of each layer, ``[batch, heads, tokens, dim]``, on any device. Must not change during the call.
        layout: layout of the cache.
        row: index of the sequence in the batch.
        first_token: index in ``tokens`` of the start of the first block.
        blocks: number of blocks; None: all full blocks from there. Tokens after the last full block are not copied.
        out: destination, uint8 ``[blocks, block_bytes]``; None: new memory.

    Returns:
        uint8 ``[blocks, block_bytes]`` on the CPU, as ``KVClient.store`` expects it.

    Raises:
        InvalidArgument: the tensors do not match the layout, or have too few tokens.
    """
    layout.check(layers)
    tokens = min(keys.shape[2] for keys, _ in layers)
    if first_token < 0 or not 0 <= row < layers[0][0].shape[0]:
        raise InvalidArgument("row or first_token is out of range", row=row, first_token=first_token)
    count = max(0, tokens - first_token) // layout.block_tokens if blocks is None else blocks
    end = first_token + count * layout.block_tokens
    if count < 0 or end > tokens:
        raise InvalidArgument("the cache has fewer tokens than wanted", tokens=tokens, wants=end)
    memory = layout.allocate(count) if out is None else out
    if memory.shape[0] != count:
        raise InvalidArgument("the memory must have one row per block", got=memory.shape[0], wants=count)
    for pair, places in zip(layers, layout.pieces(memory), strict=True):
        for tensor, place in zip(pair, places, strict=True):
            heads, dim = tensor.shape[1], tensor.shape[3]
            part = tensor.detach()[row, :, first_token:end].view(heads, count, layout.block_tokens, dim)
            place.copy_(part.transpose(0, 1))
    return memory


def import_blocks(
    blocks: torch.Tensor, layout: KVLayout, *, tokens: int | None = None, devices: Sequence[torch.device | str] | None = None
) -> list[KV]:
    """Create cache tensors from consecutive blocks.

    Args:
        blocks: uint8 ``[blocks, block_bytes]``: as filled by ``KVClient.load``. Pass only blocks that were hits.
        layout: layout of the blocks.
        tokens: number of leading tokens to return; None: all.
        devices: the device of each layer's tensors; None: that of the blocks.

    Returns:
        Keys and values of each layer: new contiguous tensors ``[1, heads, tokens, dim]``.

    Raises:
        InvalidArgument: the memory does not match the layout, has too few tokens, or the number of devices is wrong.
    """
    count = blocks.shape[0] * layout.block_tokens
    tokens = count if tokens is None else tokens
    if not 0 <= tokens <= count:
        raise InvalidArgument("tokens must be at least 0, and at most those of the blocks", tokens=tokens, has=count)
    if devices is not None and len(devices) != len(layout.layers):
        raise InvalidArgument("one device per layer is required", devices=len(devices), layers=len(layout.layers))
    layers = []
    for number, pair in enumerate(layout.pieces(blocks)):
        target = blocks.device if devices is None else devices[number]
        keys, values = (_joined(part, tokens).to(target) for part in pair)
        layers.append((keys, values))
    return layers


def _joined(part: torch.Tensor, tokens: int) -> torch.Tensor:
    """Return ``[blocks, heads, block_tokens, dim]`` as ``[1, heads, tokens, dim]``, contiguous and never a view of ``part``."""
    heads, block_tokens, dim = part.shape[1:]
    joined = torch.empty((1, heads, tokens, dim), dtype=part.dtype, device=part.device)
    whole = tokens // block_tokens
    if whole:
        split = joined[0, :, : whole * block_tokens].view(heads, whole, block_tokens, dim)
        split.copy_(part[:whole].transpose(0, 1))
    if tokens > whole * block_tokens:
        joined[0, :, whole * block_tokens :].copy_(part[whole, :, : tokens - whole * block_tokens])
    return joined
