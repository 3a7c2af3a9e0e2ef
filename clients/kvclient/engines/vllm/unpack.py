"""KV that vLLM stored, as plain tensors: for other engines that resume from it, for tools and for inspection.

    spec = find_pages("127.0.0.1:7400", model="my-model")
    with PageReader(spec, HookOptions()) as reader:
        layers, tokens = reader.read(token_ids)                       # [(keys, values), …], each [1, heads, tokens, dim]
    cache = transformers.DynamicCache(layers)
    model.generate(ids, past_key_values=cache)                        # the same weights: the same tokens

The connector stores pages as vLLM's attention kernel has them, and on a CPU that is not ``[tokens, dim]``. Within a page of one
head, of N tokens, first come N * D elements of keys, then as many of values:

======== ====================================== ======================== ===================================
kernel   where                                  keys                     values
======== ====================================== ======================== ===================================
vec      float32 and float16, and bfloat16      [D][N]                   [N][D]
         where there is no AMX
vec16    head dims that 32 does not divide      [D][N]                   [N][D]
amx      bfloat16 with AMX                      [N/16][D/2][16][2]:      [D/16][N/2][16][2]:
                                                16 tokens, pairs of dims pairs of tokens, 16 dims
======== ====================================== ======================== ===================================

Verified with vLLM 0.32 on x86-64, for head dims 64, 80 and 96 and blocks of 32 to 128 tokens. Keys have their positions applied.
Only models with full attention in all layers are supported. This module does not require vLLM. The reading engine must have the
same weights as vLLM; this module cannot check that.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import torch

from kvclient import CacheSpec, ClientOptions, InvalidArgument, TlsConfig, list_namespaces
from kvclient.engines.options import HookOptions
from kvclient.engines.torch_blocks import KV

_TILE = 16
_FAMILY, _ENGINE_LINES = "vllm", ("0.32",)
_LAYOUT_VERSION = 1
_MOST_NAMED = 8
"""Maximum number of namespaces that an error lists."""


@dataclass(frozen=True, slots=True)
class PageLayout:
    """How to read the pages of a namespace.

    Attributes:
        isa: the layout of the attention kernel.
        dtype: dtype of the elements.
        layers: number of layers.
        heads: number of heads of keys and values.
        block_tokens: tokens per page.
        head_dim: elements per token and head, of keys or values.
    """

    isa: str
    dtype: torch.dtype
    layers: int
    heads: int
    block_tokens: int
    head_dim: int

    @classmethod
    def of(cls, spec: CacheSpec) -> PageLayout:
        """Derive the format from a namespace that the vLLM connector created.

        Raises:
            InvalidArgument: not such a namespace, or its page format is not supported.
        """
        fields = dict(part.partition("=")[::2] for part in spec.layout.split(";"))
        if fields.get(_FAMILY) not in _ENGINE_LINES or spec.layout_version != _LAYOUT_VERSION:
            raise InvalidArgument(
                "the namespace does not hold pages of a supported vLLM version",
                layout=spec.layout,
                known=", ".join(_ENGINE_LINES),
            )
        if fields.get("attention") != "CPU_ATTN" or fields.get("isa") not in _READERS or "order" in fields:
            raise InvalidArgument("the page format of this attention kernel is not supported", layout=spec.layout)
        if fields.get("kind") != "full" or spec.shard_count != 1 or "order" in fields:
            raise InvalidArgument("only full attention on a single rank can be read", layout=spec.layout)
        if "stored" in fields:
            raise InvalidArgument(
                "only blocks in the engine's own numbers can be read: use an engine with stored_dtype engine", layout=spec.layout
            )
        dtype = getattr(torch, spec.dtype, None)
        shape = fields.get("page", "").split("x")
        if not isinstance(dtype, torch.dtype) or len(shape) != 3 or not all(part.isdecimal() for part in shape):
            raise InvalidArgument("the layout of the namespace has no valid page shape", layout=spec.layout, dtype=spec.dtype)
        heads, tokens, content = map(int, shape)
        size = heads * tokens * content * dtype.itemsize
        if tokens != spec.block_tokens or content % 2 or size != spec.layer_block_bytes:
            raise InvalidArgument(
                "the page shape does not match the block size of the namespace", layout=spec.layout, block_tokens=tokens
            )
        layout = cls(fields["isa"], dtype, spec.layers, heads, tokens, content // 2)
        if layout.isa == "amx" and (tokens % _TILE or layout.head_dim % _TILE):
            raise InvalidArgument("the page is not a multiple of 16x16 tiles", layout=spec.layout)
        return layout

    @property
    def block_bytes(self) -> int:
        """Bytes of a page of all layers."""
        return self.layers * self.heads * self.block_tokens * 2 * self.head_dim * self.dtype.itemsize

    def unpack(self, blocks: torch.Tensor) -> list[KV]:
        """Convert pages to tensors.

        Args:
            blocks: consecutive pages, uint8 ``[blocks, block_bytes]`` on the CPU, contiguous.

        Returns:
            Keys and values of each layer, ``[1, heads, blocks * block_tokens, head_dim]``; nothing is a view of ``blocks``.

        Raises:
            InvalidArgument: the memory has the wrong size.
        """
        if blocks.dtype != torch.uint8 or blocks.ndim != 2 or blocks.shape[1] != self.block_bytes or not blocks.is_contiguous():
            raise InvalidArgument("pages must be contiguous uint8 [blocks, block_bytes]", shape=tuple(blocks.shape))
        count, tokens, dim = blocks.shape[0], self.block_tokens, self.head_dim
        pages = blocks.view(self.dtype).view(count, self.layers, self.heads, 2, tokens * dim)
        read_keys, read_values = _READERS[self.isa]
        layers = []
        for layer in range(self.layers):
            keys, values = read_keys(pages[:, layer, :, 0], tokens, dim), read_values(pages[:, layer, :, 1], tokens, dim)
            layers.append((_concatenate(keys), _concatenate(values)))
        return layers


_Read = Callable[[torch.Tensor, int, int], torch.Tensor]
"""Convert a kernel's ``[blocks, heads, tokens * dim]`` to ``[blocks, heads, tokens, dim]``; a view if possible."""


def _plain(area: torch.Tensor, tokens: int, dim: int) -> torch.Tensor:
    return area.view(*area.shape[:2], tokens, dim)


def _transposed(area: torch.Tensor, tokens: int, dim: int) -> torch.Tensor:
    return _plain(area, dim, tokens).transpose(2, 3)


def _amx_keys(area: torch.Tensor, tokens: int, dim: int) -> torch.Tensor:
    tiles = area.view(*area.shape[:2], tokens // _TILE, dim // 2, _TILE, 2)
    return tiles.transpose(3, 4).flatten(4, 5).flatten(2, 3)


def _amx_values(area: torch.Tensor, tokens: int, dim: int) -> torch.Tensor:
    tiles = area.view(*area.shape[:2], dim // _TILE, tokens // 2, _TILE, 2)
    return tiles.permute(0, 1, 3, 5, 2, 4).flatten(4, 5).flatten(2, 3)


_READERS: dict[str, tuple[_Read, _Read]] = {
    "vec": (_transposed, _plain),
    "vec16": (_transposed, _plain),
    "amx": (_amx_keys, _amx_values),
}


def _concatenate(parts: torch.Tensor) -> torch.Tensor:
    """Copy ``[blocks, heads, tokens, dim]`` to new memory ``[1, heads, blocks * tokens, dim]``."""
    return parts.transpose(0, 1).contiguous().flatten(1, 2).clone()[None]


def find_pages(
    metadata: str,
    *,
    model: str,
    weights_epoch: str | None = None,
    namespace: str = "",
    tenant: str = "",
    tls: TlsConfig | None = None,
    options: ClientOptions | None = None,
) -> CacheSpec:
    """Find the namespace of a model's pages that vLLM stored in a supported format.

    Args:
        metadata: address of the metadata server.
        model: name of the model in vLLM, or in its connector's options.
        weights_epoch: version of the weights; None: only one exists.
        namespace: prefix of its name in hex digits, as the connector logs it; empty: only one exists.
        tenant: owner of the KV.
        tls: as for ``KVClient.connect``.
        options: only the token is used.

    Raises:
        InvalidArgument: none exists, none has a supported format, or several exist, of which the arguments must select one.
        KVStoreError: the metadata server does not answer.
    """
    why: InvalidArgument | None = None
    found: list[CacheSpec] = []
    for spec in reversed(list_namespaces(metadata, tls=tls, token=None if options is None else options.shown_token())):
        wanted = spec.model == model and spec.tenant == tenant and spec.layout.startswith(f"{_FAMILY}=")
        named = weights_epoch in {None, spec.weights_epoch} and spec.namespace.hex().startswith(namespace.lower())
        if wanted and named:
            try:
                PageLayout.of(spec)
            except InvalidArgument as error:
                why = why or error
            else:
                found.append(spec)
    if len(found) == 1:
        return found[0]
    if found:
        names = ", ".join(f"{spec.namespace.hex()} (weights epoch {spec.weights_epoch!r})" for spec in found[:_MOST_NAMED])
        raise InvalidArgument(
            "several namespaces match; select one with namespace or weights_epoch",
            model=model,
            there=len(found),
            the_latest=names,
        )
    raise why or InvalidArgument("no namespace of this model", model=model, tenant=tenant)


class PageReader:
    """Reads prefixes of one namespace. Thread-safe; a context manager.

    Args:
        spec: the namespace; see ``find_pages``.
        options: addresses of the store, and deadlines.

    Raises:
        InvalidArgument: the page format is not supported.
        KVStoreError: the store does not answer, and ``require_store`` is set.
    """

    def __init__(self, spec: CacheSpec, options: HookOptions) -> None:
        self.layout = PageLayout.of(spec)
        self._options = options
        self._client = options.connect(spec)

    def read(self, tokens: list[int], most: int | None = None) -> tuple[list[KV], int]:
        """Read the longest stored prefix.

        Args:
            tokens: token ids of a prompt without adapters, images or salts.
            most: maximum number of tokens, rounded down to blocks. To resume, leave at least one token to compute its logits.

        Returns:
            Keys and values of each layer, ``[1, heads, tokens, dim]``, and the number of tokens; a miss returns ``([], 0)``.
        """
        most = len(tokens) if most is None else min(most, len(tokens))
        keys = self._client.keys(tokens[: max(0, most) // self.layout.block_tokens * self.layout.block_tokens])
        found = self._client.lookup(keys, deadline_s=self._options.lookup_deadline_s)
        memory = torch.empty((found.hit_blocks, self.layout.block_bytes), dtype=torch.uint8)
        hit = self._client.load(found, memory, deadline_s=self._options.load_deadline_s).hit_blocks
        return (self.layout.unpack(memory[:hit]), hit * self.layout.block_tokens) if hit else ([], 0)

    def close(self) -> None:
        """Disconnect from the store."""
        self._client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
