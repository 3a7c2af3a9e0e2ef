"""Ownership of a volume on a shared file system: the node that may write to it, and its takeover by another node.

Theory of operation.

1. A *claim* is a file ``claim.<token>`` in the volume's folder. It names a node. The node of the claim with the highest token
   owns the volume; without claims, the node that the volume is named after does (``storage-1/nvme0``). A claim is written under
   another name and then linked, so it appears at once and complete, and of two nodes that claim one token exactly one succeeds.
   This requires neither file locks nor the metadata servers, works while the index is lost, and claims are never removed.
2. The superblock has the highest token that was *published*. An owner whose token is lower is *fenced*: it reads the superblock
   before it writes a batch of slots, after each commit, and every few seconds, and writes nothing more.
3. The owner writes every other file under a name that has its token: catalog, lock and slot manifest. A fenced owner that still
   writes changes files that no reader opens.
4. A new owner publishes its token before it copies the old catalog. So a commit that the old owner saw succeed is in the copy.
5. A slot that a fenced owner writes late has a generation of an earlier epoch, which no catalog and no manifest of the new owner
   names. If it hits a slot that the new owner has filled, header or checksums differ: the block is a miss.

``next_step`` decides from the files alone, so after a crash at any point, the same or another node continues.
"""

from __future__ import annotations

import errno
import mmap
import os
import re
import secrets
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Final

from kvstore.core.errors import Conflict, CorruptBlock, Unavailable, Unsupported
from kvstore.core.types import NodeId, VolumeId
from kvstore.process import lmdb_meta
from kvstore.tiers.nvme.catalog import CATALOG_FILE
from kvstore.tiers.nvme.superblock import SUPERBLOCK_BYTES, Superblock, newest_superblock

SLAB_FILE: Final = "slab.kv"
CATALOG_FOLDER: Final = "catalog"
LOCK_FILE: Final = "lock"
MANIFEST_FILE: Final = "roster"  # the name on disk from before it was called a manifest; the magic "KVROST" has it, too
CLAIM_FILE: Final = "claim"
_CLAIM = re.compile(rf"{CLAIM_FILE}\.(\d{{1,18}})")
_CATALOG = re.compile(rf"{CATALOG_FOLDER}\.(\d{{1,18}})")
_MOST_CLAIM_BYTES: Final = 1024
_NO_LINKS: Final = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV)
"""Errors of file systems without hard links."""
_COPIES: Final = 3
"""Attempts to copy a catalog that its old owner changes at the same time."""


class VolumeAdopted(Conflict):
    """Another node owns the volume.

    Args:
        path: of the volume.
        volume_id: of the volume; None: unknown.
        node_id: the owner.
        token: its token.
    """

    def __init__(self, path: Path, volume_id: VolumeId | None, node_id: NodeId, token: int) -> None:
        super().__init__(
            f"volume {volume_id or path} belongs to node {node_id or 'unknown'} (token {token}), which has adopted it; "
            "stop that node to get the volume back; if it was killed, this node takes it back after node.adopt_after",
            path=path,
        )
        self.node_id = node_id
        self.token = token


class ClaimsMissing(CorruptBlock):
    """The superblock has a token that no claim has.

    Args:
        token: of the superblock.
    """

    def __init__(self, path: Path, token: int) -> None:
        super().__init__(
            f"claims of this volume are missing: its superblock has token {token}, and no claim does; put the claim files back,"
            f" or, if no node has the volume open, write the owner's name to {name_at(CLAIM_FILE, token)} in its folder",
            path=path,
        )


@dataclass(frozen=True, slots=True)
class Claim:
    """The claim in force. Token 0: without a claim file."""

    token: int
    node_id: NodeId


class Owner(Enum):
    """The node that has the claim in force, as another node sees it."""

    SELF = "self"
    PRESENT = "present"
    """Another node that may be alive."""
    ABSENT = "absent"
    """Another node that has been absent for long enough."""


class Step(Enum):
    """The next action of a node on a volume."""

    WAIT = "wait"
    """Nothing: the owner may be alive."""
    CLAIM = "claim"
    """Claim the next token."""
    PUBLISH = "publish"
    """Write the token to both copies of the superblock: this fences the old owner."""
    COPY = "copy"
    """Copy the catalog of the last owner that had one."""
    OPEN = "open"
    """Open the volume as its owner."""
    KEEP = "keep"
    """Go on as the owner."""
    RESTORE = "restore"
    """Publish the token again: a late write of a fenced node has replaced it."""
    DROP = "drop"
    """Stop writing: another node owns the volume."""
    REFUSE = "refuse"
    """Do nothing: claims that the superblock proves are missing."""


@dataclass(frozen=True, slots=True)
class VolumeObservation:
    """A volume as a node finds it.

    Attributes:
        owner: the node that has the claim in force.
        token: its token.
        published: token of the superblock.
        catalog: token of the newest complete catalog; -1: there is none.
        held: token with which this node has the volume open; None: it does not.
    """

    owner: Owner
    token: int
    published: int
    catalog: int
    held: int | None = None


NOT_OPEN: Final[Mapping[tuple[Owner, int], Step]] = {
    (Owner.PRESENT, -1): Step.WAIT,
    (Owner.PRESENT, 0): Step.WAIT,
    (Owner.PRESENT, 1): Step.WAIT,
    (Owner.ABSENT, -1): Step.CLAIM,
    (Owner.ABSENT, 0): Step.CLAIM,
    (Owner.ABSENT, 1): Step.REFUSE,
    (Owner.SELF, -1): Step.PUBLISH,
    (Owner.SELF, 0): Step.OPEN,
    (Owner.SELF, 1): Step.REFUSE,
}
"""(owner, published token compared with the claim in force) -> step, for a node that does not have the volume open."""
OPEN: Final[Mapping[tuple[int, int], Step]] = {
    (-1, -1): Step.DROP,
    (-1, 0): Step.DROP,
    (-1, 1): Step.DROP,
    (0, -1): Step.RESTORE,
    (0, 0): Step.KEEP,
    (0, 1): Step.DROP,
    (1, -1): Step.DROP,
    (1, 0): Step.DROP,
    (1, 1): Step.DROP,
}
"""(claim in force, published token), each compared with the token of the node that has the volume open -> step."""


def next_step(seen: VolumeObservation) -> Step:
    """Decide the next step of a node from the state of the volume."""
    if seen.held is not None:
        return OPEN[_compared(seen.token, seen.held), _compared(seen.published, seen.held)]
    step = NOT_OPEN[seen.owner, _compared(seen.published, seen.token)]
    return Step.COPY if step is Step.OPEN and 0 <= seen.catalog < seen.token else step


def _compared(left: int, right: int) -> int:
    return (left > right) - (left < right)


# ---- names ----
def home_of(volume_id: VolumeId) -> NodeId:
    """The node that a volume is named after: its owner until the first claim."""
    return NodeId(volume_id.partition("/")[0])


def name_at(name: str, token: int) -> str:
    """Name of an owner's file or folder."""
    return name if token == 0 else f"{name}.{token}"


def newest_catalog(path: Path, token: int) -> int:
    """Token of the newest complete catalog that is not newer than ``token``; -1: there is none."""
    found = [int(match[1]) for name in os.listdir(path) if (match := _CATALOG.fullmatch(name)) is not None]
    found = [number for number in found if number <= token]
    if (path / CATALOG_FOLDER / CATALOG_FILE).exists():
        found.append(0)
    return max(found, default=-1)


# ---- claims ----
def claim_in_force(path: Path, home: NodeId) -> Claim:
    """The claim with the highest token, or that of ``home``. An unreadable claim is that of an unknown node (empty name).

    Raises:
        OSError: the folder cannot be read.
    """
    token = max((int(match[1]) for name in os.listdir(path) if (match := _CLAIM.fullmatch(name)) is not None), default=0)
    if token == 0:
        return Claim(0, home)
    content = _read_claim(path / name_at(CLAIM_FILE, token))
    return Claim(token, NodeId(content.partition(b"\n")[0].decode(errors="replace")))


def is_claimed(path: Path, token: int) -> bool:
    """Whether a token is claimed.

    Raises:
        OSError: the folder cannot be read.
    """
    try:
        (path / name_at(CLAIM_FILE, token)).stat()
    except FileNotFoundError:
        return False
    return True


def claim(path: Path, token: int, node_id: NodeId) -> bool:
    """Claim a token for a node. Returns whether this call succeeded.

    Raises:
        Unsupported: the file system does not support hard links.
        OSError: the file system refuses it.
    """
    content = f"{node_id}\n{secrets.token_hex(16)}\n".encode()
    temporary = path / f"{CLAIM_FILE}.{token}.{secrets.token_hex(8)}"
    target = path / name_at(CLAIM_FILE, token)
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        if os.write(fd, content) != len(content):  # a name that is cut off may be that of another node
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(temporary))
        os.fsync(fd)
        _link(temporary, target)
    finally:
        os.close(fd)
        temporary.unlink(missing_ok=True)
    sync_folder(path)
    return _read_claim(target) == content


def _link(temporary: Path, target: Path) -> None:
    try:
        target.hardlink_to(temporary)
    except FileExistsError:
        pass  # the content decides: a network file system may repeat a call that had succeeded
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        raise Unsupported(
            "the file system of this volume does not support hard links, which claims require; set node.adopt_mounts=false,"
            " or move the volume",
            path=target.parent,
            reason=error.strerror,
        ) from error


def release(path: Path, volume_id: VolumeId, token: int) -> bool:
    """Give a volume back to the node that it is named after, which then owns the next token."""
    return claim(path, token + 1, home_of(volume_id))


def _read_claim(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(_MOST_CLAIM_BYTES)
    except FileNotFoundError:
        return b""


# ---- superblock and catalog ----
def read_superblock(path: Path) -> Superblock:
    """Read the superblock of the volume in a folder, from the device if the file system supports O_DIRECT.

    Raises:
        CorruptBlock: it is damaged, or of another version.
        OSError: it cannot be read.
    """
    flags = os.O_RDONLY | os.O_CLOEXEC
    try:
        fd = os.open(path / SLAB_FILE, flags | os.O_DIRECT)
    except FileNotFoundError:
        raise
    except OSError:
        fd = os.open(path / SLAB_FILE, flags)
    try:
        with mmap.mmap(-1, 2 * SUPERBLOCK_BYTES) as pages:
            os.preadv(fd, [pages], 0)
            return newest_superblock(bytes(pages))[0]
    finally:
        os.close(fd)


def copy_catalog(path: Path, source: int, token: int) -> None:
    """Copy the catalog of an earlier token. The copy gets its name last, so it is complete or absent.

    The old owner may still change its catalog. LMDB overwrites no page that the last transaction can reach, so the copy is that
    transaction's state if no other one has ended since, which the meta pages show.

    Raises:
        CorruptBlock: the source is damaged.
        Unavailable: the source changes all the time.
        OSError: it cannot be read, or the copy cannot be written.
    """
    old = path / name_at(CATALOG_FOLDER, source) / CATALOG_FILE
    target = path / name_at(CATALOG_FOLDER, token)
    temporary = target.with_name(f"{target.name}.new")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(mode=0o700)
    for _ in range(_COPIES):
        before = _meta_pages(old)
        shutil.copyfile(old, temporary / CATALOG_FILE)
        if _meta_pages(old) == before:
            break
    else:
        raise Unavailable("the old owner of this volume still changes its catalog", path=path)
    fd = os.open(temporary / CATALOG_FILE, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
    sync_folder(temporary)
    temporary.rename(target)
    sync_folder(path)


def _meta_pages(catalog: Path) -> bytes:
    with catalog.open("rb") as file:
        head = file.read(lmdb_meta.META_BYTES)
    meta = lmdb_meta.parse_meta(head)
    if meta is None:
        raise CorruptBlock("the meta pages of a catalog are invalid", path=catalog)
    return head[: 2 * meta.page_size]


def remove_old_files(path: Path, token: int) -> None:
    """Remove catalogs, locks and slot manifests of earlier tokens. Failures leave them: they are only space."""
    for name in os.listdir(path):
        base, _, number = name.removesuffix(".new").partition(".")
        if base not in (CATALOG_FOLDER, LOCK_FILE, MANIFEST_FILE) or not (number or "0").isdigit() or int(number or 0) >= token:
            continue
        if base == CATALOG_FOLDER:
            shutil.rmtree(path / name, ignore_errors=True)
        else:
            with suppress(OSError):
                (path / name).unlink()


def sync_folder(path: Path) -> None:
    """Sync a folder, so that files created or renamed in it survive a crash."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
