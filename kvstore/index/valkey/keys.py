"""Names of the keys in Valkey, and their hash slots. Pure.

A block's record is stored at ``{hhh}`` + the 16 bytes of its key, where ``hhh`` is the block's range (the first 12 bits of the
key) in hex. The hash slot of a key in braces is that of the braces' content, so one range is in one slot, and so on one
shard. A marker at ``{hhh}`` says in which index epoch the range was complete. Small state has the tag ``{kv}``.
"""

from __future__ import annotations

from binascii import crc_hqx
from typing import Final

from kvstore.core import limits
from kvstore.core.types import KEY_BYTES, BlockKey
from kvstore.index.contract import ServerRole

SLOTS: Final = 16_384


def slot_of_tag(tag: bytes) -> int:
    """The hash slot of a tag: CRC-16/XMODEM, as the cluster specification has it."""
    return crc_hqx(tag, 0) % SLOTS


TAGS: Final = tuple(b"{%03x}" % number for number in range(limits.DIGEST_RANGES))
"""Tag of each range with its braces: the name of the range's marker, and the prefix of its blocks."""
RANGE_SLOTS: Final = tuple(slot_of_tag(tag[1:-1]) for tag in TAGS)
SMALL_TAG: Final = b"{kv}"
SMALL_SLOT: Final = slot_of_tag(b"kv")
TAG_BYTES: Final = len(TAGS[0])
NAME_BYTES: Final = TAG_BYTES + KEY_BYTES
"""Length of the name of a record."""

META: Final = SMALL_TAG + b"meta"
LIVES: Final = SMALL_TAG + b"lives"
BOOTS: Final = SMALL_TAG + b"boots"
DEAD: Final = SMALL_TAG + b"dead"
NAMESPACES: Final = SMALL_TAG + b"ns"
NOTES: Final = SMALL_TAG + b"notes"
QUIET_NOTES: Final = SMALL_TAG + b"quiet"
BEATS: Final = SMALL_TAG + b"beats"
LEASES: Final = {role: SMALL_TAG + b"lease:" + role.encode() for role in ServerRole}
"""Each expires with its lease. A new index epoch leaves them as they are."""


def record_name(key: BlockKey) -> bytes:
    """Name of a block's record."""
    return TAGS[key[0] << 4 | key[1] >> 4] + key


ALL_SMALL: Final = (META, LIVES, BOOTS, DEAD, NAMESPACES, NOTES, QUIET_NOTES, BEATS)
