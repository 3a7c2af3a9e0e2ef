"""Format of an LMDB index: its databases and its version. An index of another version is dropped, and nodes publish again."""

from __future__ import annotations

import secrets
from typing import Final

import lmdb

from kvstore.core.types import KEY_BYTES

_FORMAT_NAME: Final = b"kvstore-index/"
FORMAT: Final = _FORMAT_NAME + b"2"
DATABASES: Final = (b"meta", b"blocks", b"lives", b"dead", b"namespaces", b"notes", b"beats")


def defect(env: lmdb.Environment) -> str:
    """Why the content of the environment is not an index of this format; empty: it is one."""
    try:
        meta = env.open_db(b"meta", create=False)
        with env.begin(db=meta) as txn:
            found, epoch = txn.get(b"format", b""), txn.get(b"epoch", b"")
        if found.startswith(_FORMAT_NAME) and found != FORMAT:
            return f"its format is {found[:32].decode(errors='replace')}, this version reads {FORMAT.decode()}"
        for name in DATABASES:
            env.open_db(name, create=False)
    except lmdb.NotFoundError:
        return "content is not an index"
    return "" if found == FORMAT and len(epoch) == KEY_BYTES else "content is not an index"


def defect_unless_empty(env: lmdb.Environment) -> str:
    """As :func:`defect`, after an empty environment was made an index."""
    if env.stat()["entries"]:
        return defect(env)
    databases = [env.open_db(name) for name in DATABASES]
    with env.begin(db=databases[0], write=True) as txn:
        txn.put(b"epoch", secrets.token_bytes(KEY_BYTES))
        txn.put(b"format", FORMAT)
    return ""
