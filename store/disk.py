"""Owns what is checked about a place and a file before LMDB maps it: file system, header, length.

LMDB trusts its file: a foreign one gives an obscure error, a shorter one than its header says kills the
process with SIGBUS at the first access. Everything here reads with plain I/O and changes nothing.
"""

import os
import re
import struct
from pathlib import Path
from typing import NamedTuple

from core.errors import LogDamaged, LogForeign, StoreError

ANY_FILESYSTEM = "ROLLTAPE_ANY_FILESYSTEM"
"""Set to 1, it allows file systems whose locks and memory maps nobody vouches for."""

REMOTE = frozenset(
    {"nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "afs", "ceph", "glusterfs", "lustre", "beegfs", "gpfs"}
    | {"virtiofs", "vboxsf", "vmhgfs", "prl_fs", "fuse", "fuseblk", "ncpfs", "coda", "orangefs", "ocfs2"}
)
"""File system types without the flock and shared-map semantics that LMDB needs (every `fuse.*` too)."""

_OCTAL = re.compile(r"\\([0-7]{3})")
_PAGE = struct.Struct("<QHHHH")
_META = struct.Struct("<IIQQ")
_TREE = struct.Struct("<IHHQQQQQ")
_TAIL = struct.Struct("<QQ")
META_FLAG = 0x08
MAGIC = 0xBEEFC0DE
MAX_PAGE = 65536
READS = 3
"""A writer may commit between the reads of the two pages, but hardly so often."""
META_SIZE = _PAGE.size + _META.size + 2 * _TREE.size + _TAIL.size


class MetaPage(NamedTuple):
    """What one of the two header pages of an LMDB file says."""

    page_size: int
    map_size: int
    last_page: int
    transaction: int


def mount_type(path: Path, mounts: str) -> str:
    """Return the type of the file system that holds `path`, from the text of /proc/self/mountinfo."""
    best, kind = "", "unknown"
    for line in mounts.splitlines():
        left, _, right = line.partition(" - ")
        point = _OCTAL.sub(lambda found: chr(int(found[1], 8)), left.split()[4])
        if (path == Path(point) or Path(point) in path.parents) and len(point) >= len(best):
            best, kind = point, right.split()[0]
    return kind


def check_filesystem(path: Path, mounts: str | None = None) -> None:
    """Raise StoreError when `path` lies on a network, FUSE or 9p file system (known on Linux only)."""
    if mounts is None:
        table = Path("/proc/self/mountinfo")
        mounts = table.read_text(encoding="utf-8", errors="replace") if table.exists() else ""
    kind = mount_type(path.resolve(), mounts)
    if (kind in REMOTE or kind.startswith("fuse.")) and os.environ.get(ANY_FILESYSTEM) != "1":
        raise StoreError(
            f"{str(path)!r} lies on a {kind} file system, which cannot keep a log that several processes map "
            "and lock: put the run on a local disk and copy it with `export` or `backup` "
            f"({ANY_FILESYSTEM}=1 overrides this at your own risk)"
        )


def read_meta(path: Path) -> MetaPage:
    """Return the newest header page of an LMDB file; raises LogForeign or LogDamaged and changes nothing."""
    return max(_both_meta(path), key=lambda meta: meta.transaction)


def _both_meta(path: Path) -> tuple[MetaPage, MetaPage]:
    with path.open("rb") as file:
        head = file.read(META_SIZE)
        if not head:
            raise LogDamaged(f"the log's file is empty: {str(path)!r}; restore it from a backup or an export")
        first = _parse_meta(path, head, 0)
        file.seek(first.page_size)
        return first, _parse_meta(path, file.read(META_SIZE), 1)


def _parse_meta(path: Path, page: bytes, number: int) -> MetaPage:
    if len(page) < META_SIZE:
        raise LogDamaged(f"the log's file is cut short in header page {number}: {str(path)!r}")
    _, _, flags, _, _ = _PAGE.unpack_from(page)
    magic, version, _, map_size = _META.unpack_from(page, _PAGE.size)
    if magic != MAGIC or not flags & META_FLAG:
        if number == 0:
            raise LogForeign(f"not a Rolltape log: {str(path)!r} (header {page[:24].hex()})")
        raise LogDamaged(f"header page {number} of {str(path)!r} is damaged (header {page[:24].hex()})")
    page_size = _TREE.unpack_from(page, _PAGE.size + _META.size)[0]
    last_page, transaction = _TAIL.unpack_from(page, META_SIZE - _TAIL.size)
    if version != 1 or not (512 <= page_size <= MAX_PAGE and page_size & (page_size - 1) == 0):
        raise LogForeign(
            f"{str(path)!r} is an LMDB file of version {version} with pages of {page_size} bytes, "
            "which this release cannot read"
        )
    return MetaPage(page_size, map_size, last_page, transaction)


def header_problems(path: Path) -> list[str]:
    """Return what is wrong between the two header pages of a file, which may be in use.

    Commit n writes page n mod 2, so their transaction numbers differ by one and have their page's parity.
    """
    for _ in range(READS):
        numbers = [meta.transaction for meta in _both_meta(path)]
        if numbers == [0, 0] or (abs(numbers[0] - numbers[1]) == 1 and numbers[0] % 2 == 0):
            return []
    return [f"the header pages name transactions {numbers}, expected neighbours, the even one first"]


def missing_bytes(path: Path, meta: MetaPage) -> int:
    """Return by how many bytes the file is shorter than its header says, 0 when it is whole."""
    return max(0, (meta.last_page + 1) * meta.page_size - path.stat().st_size)
