"""Records of the metadata servers that share an index: one hash in the slot of the small state. Pure.

Records come from other processes, so they are checked: a record that cannot be read is left out.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Final

from kvstore.core.index_backend import MetadataServerRecord
from kvstore.core.limits import MAX_NAME_BYTES
from kvstore.index.valkey.cluster import Command
from kvstore.index.valkey.connection import Reply, pack
from kvstore.index.valkey.keys import SERVERS, SMALL_SLOT

MAX_RECORDS: Final = 1_024
"""Records that are read; further ones are left out."""
_MAX_RECORD_BYTES: Final = 2_048


def exchange_commands(mine: MetadataServerRecord, ended: Collection[str]) -> list[Command]:
    """Store a record, delete others, and read all. ``decode_records`` reads the last reply."""
    fields = {"address": mine.address, "version": mine.version, "started_s": mine.started_s, "counter": mine.counter}
    words = [pack("HSET", SERVERS, mine.server_id, json.dumps(fields))]
    if ended:
        words.append(pack("HDEL", SERVERS, *ended))
    return [(SMALL_SLOT, packed) for packed in (*words, pack("HGETALL", SERVERS))]


def decode_records(reply: Reply) -> list[MetadataServerRecord]:
    """Read the records of all metadata servers."""
    words = [one for one in reply if isinstance(one, bytes)] if isinstance(reply, list) else []
    pairs = list(zip(words[::2], words[1::2], strict=False))[:MAX_RECORDS]
    return [record for name, value in pairs if (record := _decode(name, value)) is not None]


def _decode(name: bytes, value: bytes) -> MetadataServerRecord | None:
    if len(name) > MAX_NAME_BYTES or len(value) > _MAX_RECORD_BYTES:
        return None
    try:
        fields = json.loads(value)
        return MetadataServerRecord(
            name.decode(), str(fields["address"]), str(fields["version"]), float(fields["started_s"]), int(fields["counter"])
        )
    except (ValueError, KeyError, TypeError):
        return None
