"""A log that an earlier release wrote: it opens, is sound, holds what it held, and can be gone on with, for ever."""

import json
from pathlib import Path

import pytest
import zstandard

from store.log import open_log
from store.ports import GroupFate
from store.rebuilding import rebuild
from store.verify import verify
from tests.store.making import chain, claim, closed, open_run, run_event, trained

FIXTURES = Path(__file__).with_name("fixtures")
RELEASES = sorted(path.name.removesuffix(".json") for path in FIXTURES.glob("log_v*.json"))


def test_there_is_a_log_of_this_format() -> None:
    """The first, and every later one."""
    assert "log_v1" in RELEASES


@pytest.mark.parametrize("name", RELEASES)
def test_a_log_of_an_earlier_release_is_read_and_gone_on_with(tmp_path: Path, name: str) -> None:
    """Sealed and open groups, fates, journal, cache; bytes that were once written are never made unreadable."""
    facts = json.loads((FIXTURES / f"{name}.json").read_text())
    (tmp_path / "log").mkdir()
    data = zstandard.ZstdDecompressor().decompress((FIXTURES / f"{name}.mdb.zst").read_bytes())
    (tmp_path / "log" / "data.mdb").write_bytes(data)
    assert verify(tmp_path, facts["head"]) == []
    with open_log(tmp_path, readonly=True) as log:
        assert log.run_event() == run_event()
        assert (log.journal.head(), log.journal.length()) == (facts["head"], facts["length"])
        bundles = {row.uid: log.groups.fetch(row.uid) for row in log.group_rows()}
        fates = {row.uid: row.fate.value for row in log.group_rows()}
        told = {uid: [fates[uid], found.digest, len(found.records)] for uid, found in bundles.items()}
        assert told == facts["groups"]
        (large,) = [found for uid, found in bundles.items() if found.records and uid == "000004.0"]
        assert [record.event for record in large.records[1:7]] == list(chain(5, tokens=900, version=1))
        assert log.cache_get(b"key") == b"value" * 20
    assert rebuild(tmp_path) > 0
    with open_run(tmp_path) as log:
        assert claim(log).adopted
        log.journal.append_sync([])
        closed(log, 1)
        assert {row.fate for row in log.group_rows()} >= {GroupFate.TRAINED, GroupFate.ABORTED}
        trained(log, 1)
    assert verify(tmp_path, facts["head"]) == []
