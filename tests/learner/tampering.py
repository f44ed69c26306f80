"""Owns the forger of the tests: rewrites one stored event, with every checksum of its record recomputed."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path

from core.events import GroupEvent, JournalEvent
from store import codec, keys
from store.environment import Environment
from store.keys import Table
from store.records import RawRecord
from store.sealing import load, seal_group
from store.snapshot import Change


def _environment(run_dir: Path) -> Environment:
    return Environment(run_dir / "log", readonly=False, map_size=None, sync=False)


def rewrite_group(run_dir: Path, uid: str, change: Callable[[int, GroupEvent], GroupEvent]) -> None:
    """Replace events of a sealed group by what `change(tree, event)` returns, and seal it again."""

    def apply(before: list[RawRecord]) -> list[RawRecord]:
        return [
            record._replace(raw=codec.encode(change(record.tree, codec.decode_group(record.raw))))
            for record in before
        ]

    rewrite_records(run_dir, uid, apply)


def rewrite_records(run_dir: Path, uid: str, change: Callable[[list[RawRecord]], list[RawRecord]]) -> None:
    """Replace a sealed group's records by what `change` returns, each tree's numbered anew; [] removes it."""
    env = _environment(run_dir)
    prefix = keys.group_prefix(uid)
    try:
        with env.write() as snapshot:
            before = list(load(snapshot, prefix).records())
            counts: Counter[int] = Counter()
            after = []
            for record in sorted(change(before), key=lambda record: record.tree):
                after.append(record._replace(position=counts[record.tree]))
                counts[record.tree] += 1
            assert before != after, "nothing was altered"
            stale = snapshot.keys(Table.BUNDLES, prefix, keys.after(prefix))
            snapshot.put([Change(Table.BUNDLES, key, None) for key in stale])
            for number, part in enumerate(seal_group(after).parts if after else ()):
                key = keys.bundle_key(prefix, number)
                snapshot.put([Change(Table.BUNDLES, key, codec.pack(Table.BUNDLES, key, part))])
    finally:
        env.close()


def rewrite_journal(run_dir: Path, index: int, change: Callable[[JournalEvent], JournalEvent]) -> None:
    """Replace one journal event, its checksum recomputed and its link to the one before kept."""
    env = _environment(run_dir)
    key = keys.journal_key(index)
    try:
        with env.write() as snapshot:
            value = snapshot.get(Table.JOURNAL, key)
            assert value is not None
            body = codec.unpack(Table.JOURNAL, key, value).body
            event = codec.decode_journal(body[codec.CHAIN_SIZE :])
            forged = codec.encode(change(event))
            assert forged != body[codec.CHAIN_SIZE :], "nothing was altered"
            packed = codec.pack(Table.JOURNAL, key, body[: codec.CHAIN_SIZE] + forged)
            snapshot.put([Change(Table.JOURNAL, key, packed)])
    finally:
        env.close()


def flip_bit(run_dir: Path, uid: str) -> None:
    """Flip one bit in the middle of a sealed group, its checksum left as it was."""
    env = _environment(run_dir)
    prefix = keys.group_prefix(uid)
    try:
        with env.write() as snapshot:
            [key, *_] = snapshot.keys(Table.BUNDLES, prefix, keys.after(prefix))
            value = bytearray(snapshot.get(Table.BUNDLES, key) or b"")
            value[len(value) // 2] ^= 4
            snapshot.put([Change(Table.BUNDLES, key, bytes(value))])
    finally:
        env.close()


def spoil_journal(run_dir: Path, index: int, *, remove: bool) -> None:
    """Remove a journal record, or flip one of its bits and leave its checksum as it was."""
    env = _environment(run_dir)
    key = keys.journal_key(index)
    try:
        with env.write() as snapshot:
            value = bytearray(snapshot.get(Table.JOURNAL, key) or b"")
            value[len(value) // 2] ^= 4
            snapshot.put([Change(Table.JOURNAL, key, None if remove else bytes(value))])
    finally:
        env.close()
