"""Check the length of an LMDB file without LMDB.

LMDB maps the file without checks: access to a page that is missing raises SIGBUS and ends the process. So callers check before
opening that each page that can be in use is within the file.

A valid file may end before its last page number: a page that a transaction allocated at the end and freed before its commit is
never written. Such pages are in the list of free pages, so that list decides if the file is short.

Another process may write the file meanwhile. LMDB writes pages before the meta page that counts them, so the length is read after
the meta page; and a file that looks short is looked at again if the meta page has changed.

Format of LMDB 0.9, 64 bit, little-endian; no I/O here.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

MAX_PAGE_BYTES: Final = 64 << 10
META_BYTES: Final = 2 * MAX_PAGE_BYTES
"""Length of the file's beginning that contains both meta pages, for every page size."""

_PAGE_HEADER = struct.Struct("<QHHHH")  # number, pad, flags, lower, upper
_META = struct.Struct("<IIQQ")  # magic, version, address, map size
_NODE = struct.Struct("<HHHH")  # low and high half of a size or page number, flags, key size
_U64 = struct.Struct("<Q")
_MAGIC: Final = 0xBEEFC0DE
_VERSION: Final = 1
_BRANCH, _LEAF, _META_PAGE = 0x01, 0x02, 0x08
_BIG_DATA: Final = 0x01
_NO_PAGE: Final = (1 << 64) - 1
_MAX_DEPTH: Final = 32
_MAX_LOOKS: Final = 1_000
"""Most attempts while another process keeps changing the meta page. An attempt is shorter than a commit, so few are needed."""


class LmdbMeta(NamedTuple):
    """The newer meta page."""

    transaction: int
    page_size: int
    last_page: int
    free_root: int
    """Root page of the list of free pages; all ones: the list is empty."""


def parse_meta(head: bytes) -> LmdbMeta | None:
    """The newer of the two meta pages; None: one of them is invalid.

    Args:
        head: the file's first ``META_BYTES``, or all of a shorter one.
    """
    if len(head) < 152:
        return None
    (page_size,) = struct.unpack_from("<I", head, 40)
    if not 256 <= page_size <= MAX_PAGE_BYTES or page_size & (page_size - 1) or len(head) < page_size + 152:
        return None
    found: list[LmdbMeta] = []
    for at in (0, page_size):
        magic, version, _, _ = _META.unpack_from(head, at + 16)
        if magic != _MAGIC or version != _VERSION or not _PAGE_HEADER.unpack_from(head, at)[2] & _META_PAGE:
            return None
        free_root = _U64.unpack_from(head, at + 80)[0]
        last_page, transaction = struct.unpack_from("<QQ", head, at + 136)
        found.append(LmdbMeta(transaction, page_size, last_page, free_root))
    return max(found)


def is_whole(size: Callable[[], int], read: Callable[[int, int], bytes]) -> bool:
    """Whether the meta pages are valid, and every page that can be in use is within the file.

    Args:
        size: the present length of the file.
        read: ``read(offset, size)`` of it; fewer bytes at its end.
    """
    meta = parse_meta(read(0, META_BYTES))
    for _ in range(_MAX_LOOKS):
        if meta is None:
            return False
        if _contains_pages(meta, size(), read):
            return True
        latest = parse_meta(read(0, META_BYTES))
        if latest == meta:
            return False
        meta = latest
    return False


def _contains_pages(meta: LmdbMeta, file_bytes: int, read: Callable[[int, int], bytes]) -> bool:
    there = file_bytes // meta.page_size
    missing = meta.last_page + 1 - there
    if missing <= 0:
        return True
    try:
        free = {page for page in _free_pages(meta, there, read) if there <= page <= meta.last_page}
    except (ValueError, struct.error):
        return False
    return len(free) == missing


def _free_pages(meta: LmdbMeta, there: int, read: Callable[[int, int], bytes]) -> Iterator[int]:
    """Numbers of all free pages. ValueError or struct.error: the list is damaged, or cut off itself."""
    size = meta.page_size
    todo = [] if meta.free_root == _NO_PAGE else [(meta.free_root, 0)]
    seen: set[int] = set()
    while todo:
        number, depth = todo.pop()
        if number in seen or not 2 <= number < there or depth > _MAX_DEPTH:
            raise ValueError("no such page")
        seen.add(number)
        page = read(number * size, size)
        own_number, _, flags, lower, _ = _PAGE_HEADER.unpack_from(page)
        if own_number != number or not 16 <= lower <= size:
            raise ValueError("no page of a tree")
        for (at,) in struct.iter_unpack("<H", page[16 : lower - lower % 2]):
            low, high, node_flags, key_bytes = _NODE.unpack_from(page, at)
            if flags & _BRANCH:
                todo.append((low | high << 16 | node_flags << 32, depth + 1))
            elif flags & _LEAF:
                data_bytes, start = low | high << 16, at + 8 + key_bytes
                if node_flags & _BIG_DATA:
                    first = _U64.unpack_from(page, start)[0]
                    if first < 2 or first * size + 16 + data_bytes > there * size:
                        raise ValueError("the list is cut off")
                    data = read(first * size + 16, data_bytes)
                else:
                    data = page[start : start + data_bytes]
                count = _U64.unpack_from(data)[0]
                if (count + 1) * 8 > len(data):
                    raise ValueError("a list of another length")
                yield from struct.unpack_from(f"<{count}Q", data, 8)
            else:
                raise ValueError("no page of a tree")
