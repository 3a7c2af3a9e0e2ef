"""Layouts of LMCache's objects, and those that were seen: two objects of one size may mean different things."""

from __future__ import annotations

import hashlib
import math
import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from kvclient import CacheSpec, InvalidArgument
from kvclient.engines.lmcache.versions import OBJECT_FORMAT
from kvclient.engines.options import HookOptions
from kvstore.core.limits import MAX_LAYER_BLOCK_BYTES

_MOST_PER_GROUP = 4
_MOST_GROUPS = 1_024
_SHOWN_CHARACTERS = 200
_MOST_PARTS = 64


@dataclass(frozen=True, slots=True)
class ObjectLayout:
    """Meaning of an object's bytes.

    Attributes:
        size: its bytes.
        dtype: its dtype, or several joined by ``+``.
        text: dtype and shape of each tensor in it.
    """

    size: int
    dtype: str
    text: str

    @classmethod
    def of_tensors(cls, shapes: Iterable[Sequence[int]], dtypes: Sequence[Any]) -> ObjectLayout | None:
        """Return the layout of tensors that are stored one after the other; None: there are none, or they are empty.

        Args:
            shapes: of each.
            dtypes: of each: torch's.
        """
        sizes, parts, names = 0, [], []
        for shape, dtype in zip(shapes, dtypes, strict=True):
            axes = [int(axis) for axis in shape]
            sizes += math.prod(axes) * int(dtype.itemsize)
            names.append(str(dtype).removeprefix("torch."))
            parts.append(f"{names[-1]}[{','.join(map(str, axes))}]")
        return cls(sizes, "+".join(dict.fromkeys(names)), "+".join(parts)) if sizes else None

    @classmethod
    def of_bytes(cls, size: int) -> ObjectLayout:
        """Return the layout of bytes without structure."""
        return cls(size, "uint8", f"uint8[{size}]")

    @property
    def is_unstructured(self) -> bool:
        """Whether the bytes have no dtype and shape: LMCache's ``serde`` makes such objects, and its encoding is unknown."""
        return self == self.of_bytes(self.size)

    def spec(self, hook: HookOptions, model: str, chunk_tokens: int) -> CacheSpec:
        """Return the namespace of such objects.

        Args:
            hook: the options.
            model: LMCache's name of the model.
            chunk_tokens: tokens of an object.

        Raises:
            InvalidArgument: such objects cannot be stored.
        """
        text = self.text
        if len(text) > _SHOWN_CHARACTERS:
            text = hashlib.sha256(text.encode()).hexdigest()
        parts = parts_of(self.size)
        return hook.spec(
            model,
            block_tokens=chunk_tokens,
            layers=parts,
            layer_block_bytes=self.size // parts,
            dtype=self.dtype if len(self.dtype) <= _SHOWN_CHARACTERS else "mixed",
            layout=f"lmcache={OBJECT_FORMAT};objects={text}",
        )


def parts_of(size: int) -> int:
    """Return into how many equal parts an object is divided: the store limits the size of one.

    Raises:
        InvalidArgument: no such division exists.
    """
    for parts in range(max(1, -(-size // MAX_LAYER_BLOCK_BYTES)), _MOST_PARTS + 1):
        if size % parts == 0:
            return parts
    raise InvalidArgument(
        "an object of this size cannot be divided into parts; use another --chunk-size",
        object_bytes=size,
        most_parts=_MOST_PARTS,
        part_bytes=MAX_LAYER_BLOCK_BYTES,
    )


class SeenLayouts:
    """Layouts of objects that this process stored or loaded, by model and object group. Thread-safe.

    They are for lookups without a layout.
    """

    def __init__(self, sizes: Sequence[int] = ()) -> None:
        """Create an empty memory.

        Args:
            sizes: sizes of unstructured objects that are assumed for every group.
        """
        self._assumed = [ObjectLayout.of_bytes(size) for size in sizes]
        self._lock = threading.Lock()
        self._groups: OrderedDict[tuple[str, int], OrderedDict[ObjectLayout, None]] = OrderedDict()

    def record(self, model: str, group: int, layout: ObjectLayout) -> None:
        """Remember a layout, at most four per group."""
        with self._lock:
            seen = self._groups.setdefault((model, group), OrderedDict())
            seen[layout] = None
            seen.move_to_end(layout, last=False)
            self._groups.move_to_end((model, group))
            while len(seen) > _MOST_PER_GROUP:
                seen.popitem()
            while len(self._groups) > _MOST_GROUPS:
                self._groups.popitem(last=False)

    def candidates(self, model: str, group: int, stated: ObjectLayout | None) -> list[ObjectLayout]:
        """Return the layouts under which an object of this group may be stored, the likeliest first.

        Args:
            model: LMCache's name of the model.
            group: the object group.
            stated: the layout that LMCache states. Its load will use this one, so those that were seen do not count.
        """
        with self._lock:
            seen = list(self._groups.get((model, group), ()))
        return list(dict.fromkeys([*([stated] if stated else seen), *self._assumed]))
