"""KV tensors as blocks of the store, and back: for hooks that live in torch, and for anybody with a model of their own.

    layout = KVLayout.of(layers, block_tokens=64)                 # layers: [(keys, values), …], each [batch, heads, tokens, dim]
    client = KVClient.connect("127.0.0.1:7400", layout.spec("my-model"))
    client.store(client.keys(token_ids), export_blocks(layers, layout))

    room = layout.room(lookup.hit_blocks)
    result = client.load(lookup, room)
    layers = import_blocks(room[: result.hit_blocks], layout)

A Layer Block is the keys of one layer, ``[heads, block_tokens, key_dim]``, then its values, ``[heads, block_tokens, value_dim]``,
both contiguous and in the dtype of the cache. Keys are taken as they lie in the cache: with positions applied where the model
applies them before it caches, as nearly all do. A block is valid at its place in its chain only, which is what its key says.

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
"""A layout's name that would be longer is told by its digest."""


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What one token of one layer is made of: ``heads * dim`` elements of keys, and as many of values."""

    key_heads: int
    key_dim: int
    value_heads: int
    value_dim: int

    @classmethod
    def of(cls, keys: torch.Tensor, values: torch.Tensor) -> LayerShape:
        """The shape of a layer's cache.

        Raises:
            InvalidArgument: not ``[batch, heads, tokens, dim]`` of one batch and one length.
        """
        if keys.ndim != 4 or values.ndim != 4 or keys.shape[0] != values.shape[0] or keys.shape[2] != values.shape[2]:
            raise InvalidArgument(
                "keys and values take [batch, heads, tokens, dim] with one batch and one length",
                keys=tuple(keys.shape),
                values=tuple(values.shape),
            )
        return cls(keys.shape[1], keys.shape[3], values.shape[1], values.shape[3])

    @property
    def elements(self) -> int:
        """Elements of one token."""
        return self.key_heads * self.key_dim + self.value_heads * self.value_dim

    @property
    def name(self) -> str:
        """Short and unambiguous: ``2x64`` where keys and values are alike, else ``1x512+1x64``."""
        keys, values = f"{self.key_heads}x{self.key_dim}", f"{self.value_heads}x{self.value_dim}"
        return keys if keys == values else f"{keys}+{values}"


@dataclass(frozen=True)
class KVLayout:
    """How the KV of a model becomes blocks. Immutable; equal layouts of equal models are interchangeable.

    Attributes:
        block_tokens: tokens of a block.
        dtype: of every layer's cache.
        layers: in order. Where they are not all alike, a block is one opaque Layer Block of all layers one after the other.

    Raises:
        InvalidArgument: no layers, or a block of no tokens.
    """

    block_tokens: int
    dtype: torch.dtype
    layers: tuple[LayerShape, ...]

    def __post_init__(self) -> None:
        if not self.layers or self.block_tokens < 1 or any(layer.elements < 1 for layer in self.layers):
            raise InvalidArgument("a layout takes layers, and blocks of tokens", block_tokens=self.block_tokens)

    @classmethod
    def of(cls, layers: Sequence[KV], block_tokens: int) -> KVLayout:
        """The layout of a cache at hand, of any length.

        Args:
            layers: keys and values of each.
            block_tokens: tokens of a block.

        Raises:
            InvalidArgument: layers of several dtypes, or tensors of another shape.
        """
        dtypes = {tensor.dtype for pair in layers for tensor in pair}
        if len(dtypes) != 1:
            raise InvalidArgument("a cache has one dtype", dtypes=sorted(map(str, dtypes)))
        return cls(block_tokens, dtypes.pop(), tuple(LayerShape.of(*pair) for pair in layers))

    @cached_property
    def block_bytes(self) -> int:
        """Bytes of a Full Block."""
        return sum(layer.elements for layer in self.layers) * self.block_tokens * self.dtype.itemsize

    @property
    def uniform(self) -> bool:
        """Whether all layers are alike, so that each is a Layer Block."""
        return len(set(self.layers)) == 1

    @property
    def dtype_name(self) -> str:
        """As specs have it: ``float32``, ``bfloat16``."""
        return str(self.dtype).removeprefix("torch.")

    @property
    def name(self) -> str:
        """The layout as a namespace has it."""
        shapes = self.layers[0].name if self.uniform else ",".join(layer.name for layer in self.layers)
        if len(shapes) > _NAME_ROOM:
            shapes = hashlib.sha256(shapes.encode()).hexdigest()[:32]
        return f"torch/{shapes}"

    def spec(self, model: str, options: HookOptions | None = None, extra_layout: str = "") -> CacheSpec:
        """The namespace.

        Args:
            model: whose KV it is; two models of one name and shape would be served each other's.
            options: whose choices it follows; None: the defaults.
            extra_layout: whatever else makes equal tokens have other bytes.

        Raises:
            InvalidArgument: impossible values.
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

    def room(self, blocks: int) -> torch.Tensor:
        """Memory for so many blocks: uint8 ``[blocks, block_bytes]`` on the CPU, with nothing in particular in it."""
        return torch.empty((blocks, self.block_bytes), dtype=torch.uint8)

    def check(self, layers: Sequence[KV]) -> None:
        """Holds tensors against the layout.

        Raises:
            InvalidArgument: another number of layers, another shape or dtype.
        """
        if len(layers) != len(self.layers):
            raise InvalidArgument("another number of layers than the layout has", got=len(layers), wants=len(self.layers))
        for number, (pair, shape) in enumerate(zip(layers, self.layers, strict=True)):
            got = LayerShape.of(*pair)
            if got != shape or any(tensor.dtype != self.dtype for tensor in pair):
                raise InvalidArgument(
                    "a layer is not as the layout has it", layer=number, got=got.name, wants=shape.name, dtype=pair[0].dtype
                )

    def pieces(self, blocks: torch.Tensor) -> list[KV]:
        """Views of blocks, one pair a layer: keys ``[blocks, heads, block_tokens, key_dim]`` and values. No bytes are copied.

        Args:
            blocks: uint8 ``[blocks, block_bytes]``, rows of any stride that the dtype's size divides.

        Raises:
            InvalidArgument: not so.
        """
        if blocks.dtype != torch.uint8 or blocks.ndim != 2 or blocks.shape[1] != self.block_bytes:
            raise InvalidArgument(
                "blocks take uint8 [blocks, block_bytes]",
                shape=tuple(blocks.shape),
                dtype=blocks.dtype,
                block_bytes=self.block_bytes,
            )
        try:
            rows = blocks.view(self.dtype)
        except RuntimeError as error:  # how torch says that bytes are not aligned for it
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
    """Copies full blocks out of a cache.

    Args:
        layers: keys and values of each, ``[batch, heads, tokens, dim]``, on any device. Not changed; must not change meanwhile.
        layout: as they are laid out.
        row: which sequence of the batch.
        first_token: where in ``tokens`` the first block begins.
        blocks: how many; None: all full ones from there on. What is behind the last full block is not copied.
        out: where to, uint8 ``[blocks, block_bytes]``; None: new memory.

    Returns:
        uint8 ``[blocks, block_bytes]`` on the CPU: what ``KVClient.store`` takes.

    Raises:
        InvalidArgument: tensors that are not as the layout says, or fewer tokens than asked for.
    """
    layout.check(layers)
    tokens = min(keys.shape[2] for keys, _ in layers)
    if first_token < 0 or not 0 <= row < layers[0][0].shape[0]:
        raise InvalidArgument("no such row or token", row=row, first_token=first_token)
    count = max(0, tokens - first_token) // layout.block_tokens if blocks is None else blocks
    end = first_token + count * layout.block_tokens
    if count < 0 or end > tokens:
        raise InvalidArgument("the cache has not so many tokens", tokens=tokens, wants=end)
    room = layout.room(count) if out is None else out
    if room.shape[0] != count:
        raise InvalidArgument("the memory is for another number of blocks", got=room.shape[0], wants=count)
    for pair, places in zip(layers, layout.pieces(room), strict=True):
        for tensor, place in zip(pair, places, strict=True):
            heads, dim = tensor.shape[1], tensor.shape[3]
            part = tensor.detach()[row, :, first_token:end].view(heads, count, layout.block_tokens, dim)
            place.copy_(part.transpose(0, 1))
    return room


def import_blocks(
    blocks: torch.Tensor, layout: KVLayout, *, tokens: int | None = None, devices: Sequence[torch.device | str] | None = None
) -> list[KV]:
    """Makes the tensors of a cache out of consecutive blocks.

    Args:
        blocks: uint8 ``[blocks, block_bytes]``: as ``KVClient.load`` filled them. Only pass blocks that were hits.
        layout: as they are laid out.
        tokens: how many tokens are wanted, if not all: the leading ones.
        devices: where each layer's tensors go; None: where the blocks are.

    Returns:
        Keys and values of each layer: new contiguous tensors ``[1, heads, tokens, dim]``.

    Raises:
        InvalidArgument: memory that is not as the layout says, more tokens than it has, or another number of devices.
    """
    count = blocks.shape[0] * layout.block_tokens
    tokens = count if tokens is None else tokens
    if not 0 <= tokens <= count or (devices is not None and len(devices) != len(layout.layers)):
        raise InvalidArgument("more tokens than the blocks have, or not one device a layer", tokens=tokens, has=count)
    layers = []
    for number, pair in enumerate(layout.pieces(blocks)):
        target = blocks.device if devices is None else devices[number]
        keys, values = (_joined(part, tokens).to(target) for part in pair)
        layers.append((keys, values))
    return layers


def _joined(part: torch.Tensor, tokens: int) -> torch.Tensor:
    """``[blocks, heads, block_tokens, dim]`` as ``[1, heads, tokens, dim]``, contiguous and never a view of ``part``."""
    heads, block_tokens, dim = part.shape[1:]
    joined = torch.empty((1, heads, tokens, dim), dtype=part.dtype, device=part.device)
    whole = tokens // block_tokens
    if whole:
        split = joined[0, :, : whole * block_tokens].view(heads, whole, block_tokens, dim)
        split.copy_(part[:whole].transpose(0, 1))
    if tokens > whole * block_tokens:
        joined[0, :, whole * block_tokens :].copy_(part[whole, :, : tokens - whole * block_tokens])
    return joined
