"""Files of an LMDB index: open them, drop untrusted ones, grow the map, close them. This module knows nothing about blocks.

Contents of the index directory::

    data.mdb, lock.mdb   LMDB's files
    state.json           the machine boot that has the index open or, after a clean close, size and checksum of data.mdb
    opening.lock         held while a process opens or closes the index, so that one process at a time decides about it
    writers.lock         shared by all processes that have the index open for writing; exclusive for a process that is alone

LMDB runs with ``sync=False``: no commit waits for the disk. A killed process loses nothing, because the page cache has its
commits. But after a crash of the machine the file may be torn, and LMDB, which maps it without checksums, could crash on it.
Therefore the file is dropped (logged and counted) in these cases: the machine was restarted without a clean close, the content
differs from what was closed, pages are missing, or LMDB cannot read it. The index is a hint, and nodes publish their blocks
again. A ``data.mdb`` that no index wrote is moved to ``data.mdb.foreign``, in case the path was a mistake.

After a mere kill the index is kept: the check for missing pages reads two pages, whereas a rebuild takes seconds per million
blocks and makes every lookup miss until then.

Damage by others *while* a process of ours has the file open is noticed only if LMDB reports it. Then the index is marked, its
owner is notified, and the next opening drops it. If the file is truncated while it is open, the process dies of SIGBUS; the
next opening finds pages missing.

On a full disk an existing index is opened, too, and can be read. Nothing is written to it before ``state.json`` says that it is
in use: after a crash a torn file would otherwise count as clean. Each write tries to update ``state.json``.

The index does not use ``writemap``: on a full disk that would be a SIGBUS instead of an error. Deleting the files does not
disturb a running process, which keeps the deleted files until it closes them. Processes that start later create a new index.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import lmdb
import xxhash

from kvstore.core.errors import CapacityExceeded, Conflict, InvalidArgument, KVStoreError, Unavailable
from kvstore.index.counts import Count
from kvstore.observe.metric_definitions import metadata as metadata_metrics
from kvstore.process import lmdb_meta

logger = logging.getLogger(__name__)

FORMAT = 1
MAX_MAP_BYTES = 1 << 46
"""Address space of a process ends at 2**47."""
MAX_DATABASES = 8
MAX_READERS = 1_024
LOCK_FILE_BYTES = 128 + 64 * MAX_READERS
"""Size of LMDB's lock file: a header, and one cache line per reader."""
CHECKSUM_BYTES_MAX = 4 << 30
"""Larger files are recognised by size only: reading them would take longer than a rebuild is worth."""
OPENING_TIMEOUT_S = 30.0

DAMAGE = (
    lmdb.InvalidError,
    lmdb.VersionMismatchError,
    lmdb.CorruptedError,
    lmdb.PageNotFoundError,
    lmdb.PanicError,
    lmdb.BadTxnError,
    lmdb.IncompatibleError,
    lmdb.BadValsizeError,
    lmdb.CursorFullError,
    lmdb.PageFullError,
    lmdb.BadDbiError,  # no database is ever deleted, so the page that names it was changed
)
"""Errors by which LMDB reports a damaged file."""

_LITTLE_ROOM_BYTES = 1 << 20
_DISK_FULL = {errno.ENOSPC, errno.EFBIG, errno.EDQUOT}

_open_paths: set[str] = set()
_open_paths_lock = threading.Lock()


class IndexFiles:
    """The open files of one index. ``defect`` says why the content of an open environment is not an index; empty: it is one."""

    def __init__(
        self, path: Path, *, map_bytes: int, read_only: bool, count: Count, defect: Callable[[lmdb.Environment], str]
    ) -> None:
        self.path = path
        self.read_only = read_only
        self._map_bytes = map_bytes
        self._count = count
        self._defect = defect
        self._writers: int | None = None
        self._marked = False
        """Whether state.json says that the file is in use, so that writes are allowed."""
        self._real_path = os.path.realpath(path)
        with _open_paths_lock:
            if self._real_path in _open_paths:
                raise Conflict("this process has the index open already: share that object", path=path)
            _open_paths.add(self._real_path)
        try:
            self.env = self._open_existing() if read_only else self._open_or_make()
        except BaseException as error:
            self._forget()
            if isinstance(error, OSError):
                if error.errno in _DISK_FULL:
                    raise CapacityExceeded("no space on disk to open the index", path=path, reason=error) from error
                raise Unavailable("the index cannot be opened", path=path, reason=error) from error
            raise

    # ---- opening ----
    def _open_existing(self) -> lmdb.Environment:
        if not (self.path / "data.mdb").exists():
            raise Unavailable("the index does not exist: open it for writing first", path=self.path)
        try:
            env = self._environment()
        except lmdb.Error as error:
            raise Unavailable("the index cannot be read", path=self.path, reason=error) from error
        reason = self._defect(env) if self._whole() else "pages are missing"
        if not reason:
            return env
        env.close()
        raise Unavailable("the index is damaged or invalid: open it for writing to recreate it", path=self.path, reason=reason)

    def _open_or_make(self) -> lmdb.Environment:
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError) as error:
            raise InvalidArgument("the path of an index must be a directory", path=self.path) from error
        opening = _lock_file(self.path / "opening.lock")
        try:
            _lock_within(opening, OPENING_TIMEOUT_S, self.path)
            self._writers = _lock_file(self.path / "writers.lock")
            alone = _try_lock(self._writers, fcntl.LOCK_EX)
            if alone:
                self._drop_untrusted()
                self._reserve_lock_file()
                self._mark_at_opening()
            else:
                state = self._read_state()
                self._marked = state is not None and not state.get("clean")
            env = self._open_checked(may_drop=alone)
            fcntl.flock(self._writers, fcntl.LOCK_SH)  # succeeds at once: the only exclusive holder changes to shared
            return env
        finally:
            os.close(opening)

    def _mark_at_opening(self) -> None:
        try:
            self._mark_in_use()
        except OSError as error:
            if error.errno not in _DISK_FULL or not (self.path / "data.mdb").exists():
                raise
            logger.exception("no space on disk for the index: %s (read-only until there is space)", self.path)
            self._count(metadata_metrics.INDEX_READ_ONLY, 1)

    def _mark_in_use(self) -> None:
        self._write_state({"format": FORMAT, "clean": False, "machine_boot": _machine_boot()})
        self._marked = True

    def make_writable(self) -> None:
        """Make sure that state.json says that the file is in use. Call it before each write.

        Raises:
            CapacityExceeded: the disk is full.
            Unavailable: the directory is not writable.
        """
        if self._marked:
            return
        try:
            self._mark_in_use()
        except OSError as error:
            if error.errno in _DISK_FULL:
                raise CapacityExceeded("no space on disk: the index is read-only", path=self.path, reason=error) from error
            raise Unavailable("the index cannot be written to", path=self.path, reason=error) from error
        logger.warning("index writable again: %s", self.path)
        self._count(metadata_metrics.INDEX_WRITABLE_AGAIN, 1)

    def _reserve_lock_file(self) -> None:
        """Allocate the disk blocks of LMDB's lock file. It is mapped, so a page without a block on a full disk would be a SIGBUS.

        Called by a process that is alone, before LMDB opens the file: closing a file releases all locks of the process on it.
        """
        descriptor = _lock_file(self.path / "lock.mdb")
        try:
            os.posix_fallocate(descriptor, 0, LOCK_FILE_BYTES)
        except OSError as error:
            if not os.fstat(descriptor).st_blocks:
                raise
            # the first page, which serves dozens of readers, is allocated
            logger.warning("lock file of the index not preallocated: %s (%s)", self.path, error)
        finally:
            os.close(descriptor)

    def _open_checked(self, *, may_drop: bool) -> lmdb.Environment:
        for _ in range(2):
            try:
                env = self._environment()
                try:
                    reason = self._defect(env) if self._whole() else "pages are missing"
                    if not reason:
                        env.reader_check()  # frees the slots of killed readers
                        return env
                except BaseException:
                    env.close()
                    raise
                env.close()
            except DAMAGE as error:
                reason = str(error)
            except lmdb.Error as error:
                raise as_store_error(error, self.path) from error
            if not may_drop:
                break
            self._drop(reason)
        raise Unavailable(
            "the index is damaged: stop all processes that have it open, then start again", path=self.path, reason=reason
        )

    def _environment(self) -> lmdb.Environment:
        return lmdb.open(
            str(self.path),
            map_size=self._map_bytes,
            readonly=self.read_only,
            sync=False,
            metasync=False,
            readahead=False,  # keys are random, so the neighbouring page is rarely needed next
            max_dbs=MAX_DATABASES,
            max_readers=MAX_READERS,
            max_spare_txns=4,
        )

    def _whole(self) -> bool:
        """Whether the file contains all pages that LMDB may read: a mapped read beyond its end is a SIGBUS."""
        fd = os.open(self.path / "data.mdb", os.O_RDONLY | os.O_CLOEXEC)
        try:
            return lmdb_meta.is_whole(lambda: os.fstat(fd).st_size, lambda offset, size: os.pread(fd, size, offset))
        finally:
            os.close(fd)

    # ---- trust ----
    def _drop_untrusted(self) -> None:
        """Drop the files unless they are as the last owner left them. Called by a process that is alone."""
        data = self.path / "data.mdb"
        if not data.exists() or not data.stat().st_size:
            self._remove_files()
            return
        state = self._read_state()
        if state is None:
            logger.warning("foreign data file moved to data.mdb.foreign: %s", data)
            self._count(metadata_metrics.INDEX_DROPPED, 1)
            data.replace(self.path / "data.mdb.foreign")
            self._remove_files()
        elif state.get("damaged"):
            self._drop("LMDB reported damage")
        elif state.get("clean"):
            if state.get("bytes") != data.stat().st_size or state.get("checksum") != _checksum(data):
                self._drop("content differs from the clean close")
        elif state.get("machine_boot") != _machine_boot():
            self._drop("the machine was restarted without a clean close")

    def _drop(self, reason: str) -> None:
        logger.warning("index dropped: %s (%s)", self.path, reason)
        self._count(metadata_metrics.INDEX_DROPPED, 1)
        self._remove_files()

    def _remove_files(self) -> None:
        for name in ("data.mdb", "lock.mdb"):
            (self.path / name).unlink(missing_ok=True)

    def mark_damaged(self) -> None:
        """Record that LMDB found damage: the next process that opens the index alone drops it."""
        self._count(metadata_metrics.INDEX_DAMAGED, 1)
        self.mark_for_rebuild()

    def mark_for_rebuild(self) -> None:
        """Record that the next process that opens the index alone must drop it."""
        if self.read_only:
            return
        try:
            self._write_state({"format": FORMAT, "clean": False, "damaged": True, "machine_boot": _machine_boot()})
        except OSError as error:  # perhaps the disk is broken; the next call that finds the damage tries again
            logger.warning("index not marked for a rebuild: %s (%s)", self.path, error)

    def _read_state(self) -> dict[str, object] | None:
        try:
            state = json.loads((self.path / "state.json").read_text())
        except (OSError, ValueError):
            return None
        return state if isinstance(state, dict) and state.get("format") == FORMAT else None

    def _write_state(self, state: dict[str, object]) -> None:
        scratch = self.path / "state.json.new"
        try:
            with scratch.open("w") as file:
                json.dump(state, file)
                file.flush()
                os.fsync(file.fileno())
        except OSError:
            scratch.unlink(missing_ok=True)
            raise
        scratch.replace(self.path / "state.json")
        directory = os.open(self.path, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)

    # ---- growing ----
    def grow(self) -> None:
        """Double the map. No transaction of this process may be open."""
        size = self.env.info()["map_size"] * 2
        if size > MAX_MAP_BYTES:
            raise CapacityExceeded("the index has reached its maximum size", bytes=size // 2)
        logger.info("index map grown: %s (bytes=%d)", self.path, size)
        self._count(metadata_metrics.INDEX_GROWN, 1)
        self.env.set_mapsize(size)

    def adopt_size(self) -> None:
        """Adopt the map size that another process has set. No transaction of this process may be open.

        Raises:
            lmdb.PanicError: the size cannot be mapped, which only a damaged file causes; LMDB has closed the environment.
        """
        try:
            self.env.set_mapsize(0)
        except lmdb.Error as error:
            raise lmdb.PanicError(f"the map size cannot be adopted: {error}") from error

    # ---- closing ----
    def close(self) -> None:
        """Close the files. The last process to close them syncs them and records a checksum."""
        try:
            if self._writers is None:
                self.env.close()
            else:
                self._close_writer(self._writers)
        except (OSError, Unavailable, lmdb.Error) as error:  # after a restart of the machine the index will be dropped
            logger.warning("index not closed cleanly: %s (%s)", self.path, error)
            self._count(metadata_metrics.INDEX_UNCLEAN_CLOSE, 1)
        finally:
            self.env.close()
            self._forget()

    def _close_writer(self, writers: int) -> None:
        opening = _lock_file(self.path / "opening.lock")
        try:
            _lock_within(opening, OPENING_TIMEOUT_S, self.path)
            alone = _try_lock(writers, fcntl.LOCK_EX)
            if alone:
                self.env.sync(True)
            self.env.close()
            data, state = self.path / "data.mdb", self._read_state()
            if alone and self._marked and state is not None and not state.get("damaged"):
                self._write_state({"format": FORMAT, "clean": True, "bytes": data.stat().st_size, "checksum": _checksum(data)})
        finally:
            os.close(opening)

    def abandon(self) -> None:
        """Release the locks in a forked child. The environment belongs to the parent and stays untouched."""
        if self._writers is not None:
            os.close(self._writers)
            self._writers = None

    def _forget(self) -> None:
        if self._writers is not None:
            os.close(self._writers)
            self._writers = None
        with _open_paths_lock:
            _open_paths.discard(self._real_path)


def as_store_error(error: lmdb.Error, path: Path) -> KVStoreError:
    """Convert an LMDB error."""
    code = getattr(error, "code", 0)
    if isinstance(error, lmdb.DiskError | lmdb.MapFullError) or code in _DISK_FULL or (code == errno.EIO and _is_full(path)):
        return CapacityExceeded("no space on disk for the index", path=path, reason=error)
    return Unavailable("the index does not answer", path=path, reason=error)


def _is_full(path: Path) -> bool:
    """Whether the disk is full. LMDB reports a short write on a full disk as an input/output error."""
    try:
        found = os.statvfs(path)
    except OSError:
        return False
    return found.f_bavail * found.f_frsize < _LITTLE_ROOM_BYTES


def _machine_boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _checksum(path: Path) -> str | None:
    if path.stat().st_size > CHECKSUM_BYTES_MAX:
        return None
    state, buffer = xxhash.xxh3_128(), memoryview(bytearray(4 << 20))
    with path.open("rb", buffering=0) as file:
        while size := file.readinto(buffer):
            state.update(buffer[:size])
    return state.hexdigest()


def _lock_file(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT, 0o600)


def _try_lock(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _lock_within(descriptor: int, timeout_s: float, path: Path) -> None:
    deadline = time.monotonic() + timeout_s
    while not _try_lock(descriptor, fcntl.LOCK_EX):
        if time.monotonic() > deadline:
            raise Unavailable(
                "another process holds opening.lock: it did not finish opening or closing the index in time", path=path
            )
        time.sleep(0.01)
