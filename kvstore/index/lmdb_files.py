"""Files of an LMDB index: opening, dropping what cannot be trusted, growing, closing. Knows nothing of blocks.

In the index's directory::

    data.mdb, lock.mdb   LMDB's own
    state.json           which machine boot has it open, or, after a clean close, size and checksum of data.mdb
    opening.lock         held while a process opens or closes the index, so that one at a time decides on it
    writers.lock         shared by all processes that have it open for writing; who gets it alone is the only one

LMDB runs with ``sync=False``: no commit waits for the disk. A killed process loses nothing (the page cache has it), but after a
crash of the machine the file may be torn, and LMDB, which maps it and has no checksums, could fault on it. So: opened after
another machine boot without a clean close, with a content that is not what was closed, too short, or unreadable, the file is
dropped (logged and counted): the index is a hint and nodes fill it again. A ``data.mdb`` that no index wrote is moved to
``data.mdb.foreign`` instead, in case the path was a mistake. Damage done by others *while* a process of ours has the file
open is noticed only when LMDB reports it; then the index is marked, its owner is told, and it is dropped at the next opening.
A file cut off while it is open is a SIGBUS, which no process survives: the next one finds it too short.

On a full disk the index is opened all the same, if it is there: what it holds can be read, but before the state says that the
file is in use, nothing is written to it (a crash would leave a torn file that is called clean). Each write tries to note it.

Not ``writemap``: a full disk would then be a SIGBUS instead of an error. Deleting the files under a running process does not
disturb it (it keeps the deleted files until it closes); processes started later would see a new, other index.
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

from kvstore.core import lmdb_meta
from kvstore.core.errors import CapacityExceeded, Conflict, InvalidArgument, KVStoreError, Unavailable
from kvstore.observe.metric_definitions import metadata as metadata_metrics
from kvstore.observe.metrics import Event

logger = logging.getLogger(__name__)

Count = Callable[[Event, int], None]
"""``count(counter name, amount)``."""

FORMAT = 1
MAX_MAP_BYTES = 1 << 46
"""Address space of a process ends at 2**47."""
MAX_DATABASES = 8
MAX_READERS = 1_024
LOCK_FILE_BYTES = 128 + 64 * MAX_READERS
"""What LMDB takes for its lock file: a header, and a cache line a reader."""
CHECKSUM_BYTES_MAX = 4 << 30
"""Larger files are recognised by size alone: reading them would cost more than filling them again is worth."""
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
    lmdb.BadDbiError,  # no database of ours is ever dropped: the page that names it is another
)
"""What LMDB says of a file that is not as it left it."""

_LITTLE_ROOM_BYTES = 1 << 20
_NO_ROOM = {errno.ENOSPC, errno.EFBIG, errno.EDQUOT}

_open_paths: set[str] = set()
_open_paths_lock = threading.Lock()


class IndexFiles:
    """The open files of one index. ``check`` says, in an open environment, whether the content is an index of ours."""

    def __init__(
        self, path: Path, *, map_bytes: int, read_only: bool, count: Count, check: Callable[[lmdb.Environment], bool]
    ) -> None:
        self.path = path
        self.read_only = read_only
        self._map_bytes = map_bytes
        self._count = count
        self._check = check
        self._writers: int | None = None
        self._marked = False
        """Whether state.json says that the file is in use, so that it may be written to."""
        self._real_path = os.path.realpath(path)
        with _open_paths_lock:
            if self._real_path in _open_paths:
                raise Conflict("the index is open in this process already; share that one", path=path)
            _open_paths.add(self._real_path)
        try:
            self.env = self._open_existing() if read_only else self._open_or_make()
        except BaseException as error:
            self._forget()
            if isinstance(error, OSError):
                if error.errno in _NO_ROOM:
                    raise CapacityExceeded("no room on disk to open the index", path=path, reason=error) from error
                raise Unavailable("the index cannot be opened", path=path, reason=error) from error
            raise

    # ---- opening ----
    def _open_existing(self) -> lmdb.Environment:
        if not (self.path / "data.mdb").exists():
            raise Unavailable("there is no index yet; open it for writing first", path=self.path)
        try:
            env = self._environment()
        except lmdb.Error as error:
            raise Unavailable("the index cannot be read", path=self.path, reason=error) from error
        if self._whole() and self._check(env):
            return env
        env.close()
        raise Unavailable("the index is damaged or not one of ours; open it for writing to make it anew", path=self.path)

    def _open_or_make(self) -> lmdb.Environment:
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError) as error:
            raise InvalidArgument("an index takes a directory", path=self.path) from error
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
            fcntl.flock(self._writers, fcntl.LOCK_SH)  # at once: the only exclusive holder turns it into shared
            return env
        finally:
            os.close(opening)

    def _mark_at_opening(self) -> None:
        try:
            self._mark_in_use()
        except OSError as error:
            if error.errno not in _NO_ROOM or not (self.path / "data.mdb").exists():
                raise
            logger.exception("no room on disk for the index in %s: it can be read, and not be changed until there is", self.path)
            self._count(metadata_metrics.INDEX_READ_ONLY, 1)

    def _mark_in_use(self) -> None:
        self._write_state({"format": FORMAT, "clean": False, "machine_boot": _machine_boot()})
        self._marked = True

    def make_writable(self) -> None:
        """To be called before each write: makes sure that state.json says that the file is in use.

        Raises:
            CapacityExceeded: there is no room on disk to say so.
            Unavailable: the directory cannot be written to.
        """
        if self._marked:
            return
        try:
            self._mark_in_use()
        except OSError as error:
            if error.errno in _NO_ROOM:
                raise CapacityExceeded("no room on disk: the index can only be read", path=self.path, reason=error) from error
            raise Unavailable("the index cannot be written to", path=self.path, reason=error) from error
        logger.warning("the index in %s can be written to again", self.path)
        self._count(metadata_metrics.INDEX_WRITABLE_AGAIN, 1)

    def _reserve_lock_file(self) -> None:
        """Gives LMDB's lock file its blocks: it is mapped, and a page of it that finds no room later would be a SIGBUS.

        Called alone and before LMDB opens it: closing a file lets go of all locks that the process has on it.
        """
        descriptor = _lock_file(self.path / "lock.mdb")
        try:
            os.posix_fallocate(descriptor, 0, LOCK_FILE_BYTES)
        except OSError as error:
            if not os.fstat(descriptor).st_blocks:
                raise
            # its first page, which serves dozens of readers, is there
            logger.warning("the lock file of the index in %s gets no room of its own: %s", self.path, error)
        finally:
            os.close(descriptor)

    def _open_checked(self, *, may_drop: bool) -> lmdb.Environment:
        for _ in range(2):
            reason = "content is no index"
            try:
                env = self._environment()
                try:
                    if self._whole() and self._check(env):
                        env.reader_check()  # slots of readers that were killed
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
            "the index is damaged; stop all processes that have it open, then start again", path=self.path, reason=reason
        )

    def _environment(self) -> lmdb.Environment:
        return lmdb.open(
            str(self.path),
            map_size=self._map_bytes,
            readonly=self.read_only,
            sync=False,
            metasync=False,
            readahead=False,  # keys are random: what lies beside a page is not what is wanted next
            max_dbs=MAX_DATABASES,
            max_readers=MAX_READERS,
            max_spare_txns=4,
        )

    def _whole(self) -> bool:
        """Whether all pages that LMDB may touch are in the file: beyond its end, a mapped read is a SIGBUS."""
        fd = os.open(self.path / "data.mdb", os.O_RDONLY | os.O_CLOEXEC)
        try:
            return lmdb_meta.is_whole(os.fstat(fd).st_size, lambda offset, size: os.pread(fd, size, offset))
        finally:
            os.close(fd)

    # ---- trust ----
    def _drop_untrusted(self) -> None:
        """Called alone: drops the files unless they are as the last owner left them."""
        data = self.path / "data.mdb"
        if not data.exists() or not data.stat().st_size:
            self._remove_files()
            return
        state = self._read_state()
        if state is None:
            logger.warning("%s was not written by an index; it is moved to data.mdb.foreign", data)
            self._count(metadata_metrics.INDEX_DROPPED, 1)
            data.replace(self.path / "data.mdb.foreign")
            self._remove_files()
        elif state.get("damaged"):
            self._drop("LMDB reported damage")
        elif state.get("clean"):
            if state.get("bytes") != data.stat().st_size or state.get("checksum") != _checksum(data):
                self._drop("content is not what was closed")
        elif state.get("machine_boot") != _machine_boot():
            self._drop("the machine was started again without a clean close")

    def _drop(self, reason: str) -> None:
        logger.warning("the index in %s is dropped and made anew: %s", self.path, reason)
        self._count(metadata_metrics.INDEX_DROPPED, 1)
        self._remove_files()

    def _remove_files(self) -> None:
        for name in ("data.mdb", "lock.mdb"):
            (self.path / name).unlink(missing_ok=True)

    def mark_damaged(self) -> None:
        """LMDB found damage: the next process that opens the index alone drops it."""
        self._count(metadata_metrics.INDEX_DAMAGED, 1)
        self.mark_given_up()

    def mark_given_up(self) -> None:
        """The next process that opens the index alone drops it."""
        if self.read_only:
            return
        try:
            self._write_state({"format": FORMAT, "clean": False, "damaged": True, "machine_boot": _machine_boot()})
        except OSError as error:  # the disk may be what is ill; whoever meets the damage next tries again
            logger.warning("that the index is given up cannot be noted in %s: %s", self.path, error)

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
        """Doubles the map. No transaction of this process may be open."""
        size = self.env.info()["map_size"] * 2
        if size > MAX_MAP_BYTES:
            raise CapacityExceeded("the index has reached its largest size", bytes=size // 2)
        logger.info("the map of the index in %s grows to %d bytes", self.path, size)
        self._count(metadata_metrics.INDEX_GROWN, 1)
        self.env.set_mapsize(size)

    def adopt_size(self) -> None:
        """Takes over the map size that another process has set. No transaction of this process may be open.

        Raises:
            lmdb.PanicError: a size that cannot be had, which only a damaged file names; LMDB has closed the environment.
        """
        try:
            self.env.set_mapsize(0)
        except lmdb.Error as error:
            raise lmdb.PanicError(f"the map's size cannot be taken over: {error}") from error

    # ---- closing ----
    def close(self) -> None:
        """Closes the files; the last process to do so leaves them synced and with a checksum."""
        try:
            if self._writers is None:
                self.env.close()
            else:
                self._close_writer(self._writers)
        except (OSError, Unavailable, lmdb.Error) as error:  # no clean close: after a restart of the machine it will be dropped
            logger.warning("the index in %s was not closed cleanly: %s", self.path, error)
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
        """In a forked child: lets go of the locks, and leaves the environment (it is the parent's) untouched."""
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
    """LMDB's errors in our words."""
    code = getattr(error, "code", 0)
    if isinstance(error, lmdb.DiskError | lmdb.MapFullError) or code in _NO_ROOM or (code == errno.EIO and _is_full(path)):
        return CapacityExceeded("no room on disk for the index", path=path, reason=error)
    return Unavailable("the index does not answer", path=path, reason=error)


def _is_full(path: Path) -> bool:
    """Whether a commit may have found no room. LMDB calls a write that a full disk cut short an input/output error."""
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
            raise Unavailable("another process is opening or closing the index and does not end", path=path)
        time.sleep(0.01)
