"""The room that is kept behind a log's pages, so that a commit need not make the file longer."""

from pathlib import Path

import pytest

from core.errors import LogFull
from store import disk
from store.copying import compact
from store.environment import MAX_AHEAD, MIN_AHEAD
from store.log import Log, open_log
from store.verify import verify
from tests.store.making import claim, closed, fill, open_run, run_event


def beyond(data: Path) -> int:
    """Return by how many bytes a file is longer than its pages."""
    meta = disk.read_meta(data)
    return data.stat().st_size - (meta.last_page + 1) * meta.page_size


def fill_up(log: Log) -> None:
    """Append until the log refuses."""
    while True:
        fill(log, claim(log), trees=2)


def test_room_is_kept_and_bounded(tmp_path: Path) -> None:
    """A synced log that grows has room behind its pages, never more than the bound; its contents are sound."""
    data = tmp_path / "run" / "log" / "data.mdb"
    rooms: list[int] = []
    with open_run(tmp_path / "run") as log:
        for _ in range(60):
            fill(log, claim(log), trees=3)
            rooms.append(beyond(data))
    assert 0 <= min(rooms) <= max(rooms) <= MAX_AHEAD
    assert sum(room > 0 for room in rooms) > 50
    assert not verify(tmp_path / "run")


def test_a_small_log_stays_small(tmp_path: Path) -> None:
    """The room is a small share of a file, or little."""
    with open_run(tmp_path / "run") as log:
        closed(log, 1)
    assert beyond(tmp_path / "run" / "log" / "data.mdb") <= MIN_AHEAD


def test_compacting_gives_the_room_back(tmp_path: Path) -> None:
    """A compacted file ends with its last page."""
    with open_run(tmp_path / "run") as log:
        closed(log, 3)
    compact(tmp_path / "run")
    assert beyond(tmp_path / "run" / "log" / "data.mdb") == 0


def test_a_throw_away_log_keeps_no_room(tmp_path: Path) -> None:
    """Without syncing there is no flush to be spared."""
    with open_log(tmp_path / "run", create=True, role="rollout", map_size=1 << 28, sync=False) as log:
        log.open_run(run_event())
        closed(log, 3)
    assert beyond(tmp_path / "run" / "log" / "data.mdb") <= 0


def test_the_room_ends_at_the_map(tmp_path: Path) -> None:
    """A map that is nearly full is filled to the end, and the file never becomes longer than it."""
    size = 1 << 19
    with open_log(tmp_path / "run", create=True, role="rollout", map_size=size) as log:
        log.open_run(run_event())
        with pytest.raises(LogFull):
            fill_up(log)
    assert (tmp_path / "run" / "log" / "data.mdb").stat().st_size <= size
