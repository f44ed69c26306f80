"""Owns what identifies the code that makes a batch, so that replay can say what changed since."""

import hashlib
import importlib.metadata
import platform
from collections.abc import Mapping
from pathlib import Path

import numpy as np

import core

PACKAGE = "rolltape"


def code_fingerprints() -> dict[str, str]:
    """Return package version, git revision ("" outside a checkout), numpy, Python, and a digest of core/."""
    root = Path(core.__file__).parent
    return {
        "rolltape": _version(),
        "git": git_revision(root.parent),
        "core": source_digest(root),
        "numpy": np.__version__,
        "python": platform.python_version(),
    }


def changed(recorded: Mapping[str, str], current: Mapping[str, str]) -> list[str]:
    """Return one line per fingerprint that both have and that differs."""
    return [
        f"{name} was {recorded[name] or 'unknown'}, is {current[name] or 'unknown'}"
        for name in sorted(recorded.keys() & current.keys())
        if recorded[name] != current[name]
    ]


def source_digest(package: Path) -> str:
    """Return SHA-256 hex over the names and bytes of a package's Python files."""
    sha = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        sha.update(f"{path.relative_to(package).as_posix()}\0".encode())
        sha.update(hashlib.sha256(path.read_bytes()).digest())
    return sha.hexdigest()


def git_revision(root: Path) -> str:
    """Return the checked-out commit of the repository at `root`, "" where there is none."""
    git = root / ".git"
    try:
        head = (git / "HEAD").read_text().strip()
        if not head.startswith("ref: "):
            return head
        name = head.removeprefix("ref: ")
        loose = git / name
        if loose.exists():
            return loose.read_text().strip()
        for line in (git / "packed-refs").read_text().splitlines():
            if line.endswith(f" {name}"):
                return line.split(" ", 1)[0]
    except OSError:
        return ""
    return ""


def _version() -> str:
    try:
        return importlib.metadata.version(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return ""
