"""An engine's paged KV cache of any layout: pages that consist of a few contiguous parts.

| layout | tensor of a layer | parts of a page |
|---|---|---|
| ``pages`` | ``[pages, …]``: vLLM's ``[B, H, N, C]``, MLA's ``[blocks, tokens, dim]``, ``[blocks, 2, …]`` | 1: the page |
| ``split`` | ``[2, pages, …]``: flash attention's ``[2, blocks, tokens, heads, dim]``, or heads first | 2: K, V |

The order within a part, tokens before heads (NHD) or heads before tokens (HND), is the attention kernel's business: bytes are
copied in their order in memory. The layout's name is part of the namespace, so engines with different orders share no blocks. A
Layer block consists of the parts of a page in order; if a block has several pages, page after page.

This module imports torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from kvclient import CacheSpec, InvalidArgument

LAYOUT_VERSION = 1
KINDS = ("pages", "split")
DEVICES = ("cpu", "cuda")
"""Device types of a cache: addresses of other devices are neither host nor CUDA addresses."""
Kind = Literal["pages", "split"]


@dataclass(frozen=True, slots=True)
class PageShape:
    """A page of one layer.

    Attributes:
        parts: number of contiguous parts.
        part_bytes: bytes of each part.
        scales: groups of a part with their own quantisation scale; 2 if K and V share a part.
    """

    parts: int
    part_bytes: int
    scales: int = 1

    @property
    def nbytes(self) -> int:
        """Bytes of the whole page."""
        return self.parts * self.part_bytes


class CacheLayer:
    """Pages of one layer, as bytes.

    Args:
        tensor: the layer's cache, in the layout ``kind``.
        kind: see the module.

    Raises:
        InvalidArgument: not a tensor, or not on the CPU or a CUDA device; a part of a page is not contiguous, pages overlap, or
            the cache is empty.
    """

    def __init__(self, tensor: torch.Tensor, kind: Kind) -> None:
        _check_cache(tensor, kind)
        tensor = tensor.detach()
        geometry = _page_geometry(tensor, kind)
        _check_no_overlap(tensor, geometry)
        self.tensor = tensor
        self.order = geometry.order
        """Axes of a page by their order in memory, outermost first."""
        self.pages = geometry.pages
        self.page_stride = geometry.page_stride
        self.part_stride = geometry.part_stride
        self.page = PageShape(geometry.parts, geometry.part_bytes, _kv_halves(tensor, kind, geometry.order))
        self.address = tensor.data_ptr()
        page_stride = 0 if self.pages == 1 else self.page_stride  # no page follows: the stride does not matter
        self.alignment = math.gcd(self.page.part_bytes, page_stride, self.part_stride, self.address, 16)
        """Largest power of two, up to 16, that divides all sizes, strides and addresses, in bytes."""
        self.word = min(self.alignment, 8)
        """Bytes of the largest word that divides them."""

    def words(self, word: int) -> torch.Tensor:
        """Its pages as words: a view ``[pages, parts, part words]``, int64, int32, int16 or uint8.

        Args:
            word: 8, 4, 2 or 1, and a divisor of ``self.word``.
        """
        dtype = WORDS[word]
        flat = torch.empty(0, dtype=dtype, device=self.tensor.device)
        offset, rest = divmod(int(self.tensor.storage_offset()) * self.tensor.element_size(), word)
        if rest or self.tensor.untyped_storage().data_ptr() % word:
            raise InvalidArgument("the KV cache is not aligned for words", word=word)
        shape = (self.pages, self.page.parts, self.page.part_bytes // word)
        strides = (self.page_stride // word, self.part_stride // word or 1, 1)
        return flat.set_(self.tensor.untyped_storage(), offset, shape, strides)

    @property
    def end(self) -> int:
        """Address after its last byte."""
        last = self.page_stride * (self.pages - 1) + self.part_stride * (self.page.parts - 1)
        return self.address + last + self.page.part_bytes


@dataclass(frozen=True, slots=True)
class _PageGeometry:
    """Where the pages of a cache are in memory. Sizes and strides are in bytes.

    Attributes:
        order: axes of a page by their order in memory, outermost first; 0 is the first axis of a page.
        pages: number of pages.
        page_stride: distance between two pages.
        parts: parts of a page.
        part_stride: distance between the parts of a page; 0: it has one.
        part_bytes: size of a part.
    """

    order: tuple[int, ...]
    pages: int
    page_stride: int
    parts: int
    part_stride: int
    part_bytes: int


def _leading_axes(kind: Kind) -> int:
    """Number of axes before those of a page: ``[2, pages]`` or ``[pages]``."""
    return 2 if kind == "split" else 1


def _check_cache(tensor: torch.Tensor, kind: Kind) -> None:
    """Check that a tensor can be the cache of a layer in this layout."""
    if kind not in KINDS:
        raise InvalidArgument("unknown layout of a KV cache", layout=kind, known=", ".join(KINDS))
    _check_tensor(tensor)
    if (
        tensor.ndim <= _leading_axes(kind)
        or (kind == "split" and tensor.shape[0] != 2)
        or not tensor.numel()
        or tensor.layout != torch.strided
    ):
        raise InvalidArgument(
            "a KV cache must be dense [pages, …], or [2, pages, …] for the layout split", shape=tuple(tensor.shape)
        )


def _page_geometry(tensor: torch.Tensor, kind: Kind) -> _PageGeometry:
    """Find the pages of a cache.

    Engines permute the axes of a page without moving its memory: only the order in memory matters.

    Raises:
        InvalidArgument: a part of a page is not contiguous.
    """
    leading = _leading_axes(kind)
    strides: tuple[int, ...] = tensor.stride()
    order = sorted(range(leading, tensor.ndim), key=lambda axis: (-strides[axis], axis))
    part_items = math.prod(tensor.shape[axis] for axis in order)
    expected = part_items
    for axis in order:
        expected //= tensor.shape[axis]
        if tensor.shape[axis] > 1 and strides[axis] != expected:
            raise InvalidArgument("pages of the KV cache are not contiguous", shape=tuple(tensor.shape), strides=strides)
    item_bytes = tensor.element_size()
    return _PageGeometry(
        order=tuple(axis - leading for axis in order),
        pages=tensor.shape[leading - 1],
        page_stride=strides[leading - 1] * item_bytes,
        parts=2 if kind == "split" else 1,
        part_stride=strides[0] * item_bytes if kind == "split" else 0,
        part_bytes=part_items * item_bytes,
    )


def _check_no_overlap(tensor: torch.Tensor, geometry: _PageGeometry) -> None:
    """Check that no two parts of pages share a byte: each axis steps over all bytes that the finer axes cover."""
    axes = [(geometry.page_stride, geometry.pages)]
    if geometry.parts > 1:
        axes.append((geometry.part_stride, geometry.parts))
    covered = geometry.part_bytes
    for stride, count in sorted(axes):
        if count > 1 and stride < covered:
            raise InvalidArgument("pages of the KV cache overlap", shape=tuple(tensor.shape), strides=tensor.stride())
        covered += stride * (count - 1)


def _kv_halves(tensor: torch.Tensor, kind: Kind, order: Sequence[int]) -> int:
    """2 if K and V are the halves of a part, as in ``[blocks, 2, …]``; else 1."""
    return 2 if kind == "pages" and tensor.ndim == 5 and tensor.shape[1] == 2 and order[0] == 0 else 1


def _check_tensor(tensor: object) -> None:
    """Check that the bytes of a tensor are its values and can be copied."""
    if not isinstance(tensor, torch.Tensor):
        raise InvalidArgument("a KV cache must consist of torch tensors", got=type(tensor).__name__)
    if tensor.device.type not in DEVICES:
        raise InvalidArgument(
            "a KV cache must be on the CPU or on a CUDA device", device=str(tensor.device), known=", ".join(DEVICES)
        )
    if tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
        raise InvalidArgument(
            "the bytes of the tensor are not its values: resolve the view, or dequantize it", dtype=str(tensor.dtype)
        )


WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


class PagedCache:
    """The KV cache of an engine: the pages of all layers, and the size of a block.

    Args:
        layers: one tensor per layer, in layer order, all of one shape and device.
        kind: layout of the tensors; see the module.
        pages_per_block: pages of the engine per block of the store; at most the number of pages.

    Raises:
        InvalidArgument: layers that differ or share memory, pages that are not contiguous, an empty list, a tensor of
            unsupported values or device, or an impossible number of pages.
    """

    def __init__(self, layers: Sequence[torch.Tensor], kind: Kind = "pages", *, pages_per_block: int = 1) -> None:
        if not isinstance(layers, Sequence) or not layers:
            raise InvalidArgument("a KV cache requires a list with one tensor per layer", got=type(layers).__name__)
        self.layers = [CacheLayer(tensor, kind) for tensor in layers]
        first = self.layers[0]
        for number, layer in enumerate(self.layers):
            same = (layer.page, layer.pages, layer.order, layer.tensor.dtype, layer.tensor.device) == (
                first.page,
                first.pages,
                first.order,
                first.tensor.dtype,
                first.tensor.device,
            )
            if not same:
                raise InvalidArgument(
                    "a layer of the KV cache differs from the first", layer=number, shape=tuple(layer.tensor.shape)
                )
        if isinstance(pages_per_block, bool) or not isinstance(pages_per_block, int) or not 0 < pages_per_block <= first.pages:
            raise InvalidArgument(
                "pages_per_block must be between 1 and the number of pages", got=pages_per_block, pages=first.pages
            )
        self._check_apart()
        self.kind = kind
        self.page = first.page
        self.pages = first.pages
        self.dtype = first.tensor.dtype
        self.device = first.tensor.device
        self.pages_per_block = pages_per_block
        self.alignment = math.gcd(*(layer.alignment for layer in self.layers))
        self.word = min(self.alignment, 8)

    def _check_apart(self) -> None:
        """Check that no two layers share a byte. Layers may alternate in one piece of memory, page by page."""
        layers = sorted(self.layers, key=lambda layer: layer.address)
        for at, layer in enumerate(layers):
            for other in layers[at + 1 :]:
                if other.address >= layer.end:
                    break
                if _share_memory(layer, other):
                    numbers = sorted((self.layers.index(layer), self.layers.index(other)))
                    raise InvalidArgument("two layers of the KV cache share memory", layers=numbers)

    @property
    def row_bytes(self) -> int:
        """Bytes of one layer of a block in the cache."""
        return self.page.nbytes * self.pages_per_block

    @property
    def has_joined_layers(self) -> bool:
        """Whether the layers of a page are neighbours in memory, as they are in a block."""
        layers, size = self.layers, self.page.part_bytes
        return (
            self.page.parts == self.pages_per_block == 1
            and len({layer.page_stride for layer in layers}) == 1
            and all(layer.address == layers[0].address + number * size for number, layer in enumerate(layers))
        )

    @property
    def name(self) -> str:
        """The layout for the namespace: axes of a page, their order in memory, and pages per block."""
        tensor = self.layers[0].tensor
        shape = "x".join(str(size) for size in tensor.shape[_leading_axes(self.kind) :])
        order = "".join(str(axis) for axis in self.layers[0].order)
        return f"{self.kind}/{shape}/{order}/{self.pages_per_block}"

    @property
    def dtype_name(self) -> str:
        """Name of the dtype in specs: ``float32``, ``bfloat16``."""
        return str(self.dtype).removeprefix("torch.")

    def layer_table(self) -> torch.Tensor:
        """Return the places of the layers for kernels: int64 ``[layers, 3]`` on the device, in bytes.

        Each row has the address, the page stride and the part stride.
        """
        places = [(layer.address, layer.page_stride, layer.part_stride) for layer in self.layers]
        return torch.tensor(places, dtype=torch.int64, device=self.device)

    def check_pages(self, page_ids: Sequence[int]) -> torch.Tensor:
        """Check the page ids of blocks and return them as an int64 tensor on the host.

        Raises:
            InvalidArgument: not integers, a page that does not exist or is named twice, or incomplete blocks.
        """
        ids = _whole_numbers(page_ids)
        if len(ids) % self.pages_per_block:
            raise InvalidArgument(
                "the number of pages must be a multiple of pages_per_block", pages=len(ids), pages_per_block=self.pages_per_block
            )
        if len(ids):
            least, most = int(ids.min()), int(ids.max())
            if not 0 <= least <= most < self.pages:
                raise InvalidArgument("page out of range", least=least, most=most, pages=self.pages)
            if len(torch.unique(ids)) != len(ids):
                raise InvalidArgument("a page id occurs twice")
        return ids


def _whole_numbers(page_ids: object) -> torch.Tensor:
    """Convert page ids to int64 without rounding; booleans are rejected."""
    given: npt.NDArray[Any]
    if isinstance(page_ids, torch.Tensor):
        given = page_ids.cpu().numpy() if page_ids.dtype in WORDS.values() else np.empty(0)
    elif isinstance(page_ids, np.ndarray):
        given = page_ids
    else:
        given = _listed(page_ids)
    if given.ndim != 1 or given.dtype.kind not in "iu":
        raise InvalidArgument("page ids must be integers on one axis", got=type(page_ids).__name__, shape=given.shape)
    if given.dtype == np.uint64 and len(given) and int(given.max()) > np.iinfo(np.int64).max:
        raise InvalidArgument("page out of range", most=int(given.max()))
    return torch.from_numpy(given.astype(np.int64))


def _listed(page_ids: object) -> npt.NDArray[np.int64]:
    try:
        numbers = list(page_ids)  # type: ignore[call-overload]  # what cannot be gone through raises TypeError
    except TypeError as error:
        raise InvalidArgument("page ids must be a sequence of integers", got=type(page_ids).__name__) from error
    for kind in set(map(type, numbers)):  # of thousands of ids there are few
        if kind is bool or not issubclass(kind, int | np.integer):
            raise InvalidArgument("a page id must be an integer", got=kind.__name__)
    try:
        return np.array(numbers, np.int64)
    except OverflowError as error:
        raise InvalidArgument("page out of range", error=error) from error


def _share_memory(one: CacheLayer, other: CacheLayer) -> bool:
    """Whether a byte belongs to pages of both; they have as many pages, of as many parts of the same size."""
    part, away = one.page.part_bytes, other.address - one.address
    if (one.page_stride, one.part_stride) != (other.page_stride, other.part_stride):
        starts = np.sort(np.concatenate([_part_starts(one), _part_starts(other)]))
        return bool((np.diff(starts) < part).any())
    # two of their parts are ``away`` and some steps apart; a larger step covers all that the smaller ones do, so that only the
    # multiples next to the distance count
    steps = [(one.page_stride, one.pages), (one.part_stride, one.page.parts)]
    distances = {away}
    for step, count in sorted((step, count) for step, count in steps if count > 1)[::-1]:
        turns = {min(max(distance // step + more, 1 - count), count - 1) for distance in distances for more in (0, 1)}
        distances = {distance - step * turn for distance in distances for turn in turns}
    return any(abs(distance) < part for distance in distances)


def _part_starts(layer: CacheLayer) -> npt.NDArray[np.int64]:
    pages = layer.address + np.arange(layer.pages, dtype=np.int64) * layer.page_stride
    return np.add.outer(pages, np.arange(layer.page.parts) * layer.part_stride).reshape(-1)


def check_spec(
    spec: CacheSpec, *, layers: int, layer_block_bytes: int, dtype: str, layout: str, layout_version: int = LAYOUT_VERSION
) -> None:
    """Check a namespace against a cache: with a mismatch the store would serve bytes of another meaning.

    Raises:
        InvalidArgument: a field differs; the error names it.
    """
    wanted = {
        "layers": layers,
        "layer_block_bytes": layer_block_bytes,
        "dtype": dtype,
        "layout": layout,
        "layout_version": layout_version,
    }
    for name, value in wanted.items():
        if getattr(spec, name) != value:
            raise InvalidArgument(
                "the namespace does not match this KV cache", field=name, got=getattr(spec, name), expected=value
            )
