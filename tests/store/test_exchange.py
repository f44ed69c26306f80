"""Export and import: bundles keep every byte, rows keep what datums are made of."""

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from core.batch import BatchSettings, build_step
from core.errors import DataError, FoldError, LogDamaged, RolltapeError, StoreError
from core.events import GroupDropped, GroupEvent
from core.tree import Group, fold_group
from store.bundlefile import (
    MAGIC,
    EndFrame,
    GroupFrame,
    RunFrame,
    check_file,
    export_bundles,
    import_bundles,
    read_frames,
)
from store.exchange import Arrival, Passport, enter_groups
from store.jsonl import export_jsonl, import_jsonl
from store.log import Log, open_log
from store.parquet import export_parquet, import_parquet
from store.ports import GroupFate, StreamWrite
from store.row_checks import checked_arrival
from store.sealing import seal_group
from store.trajectories import TrajectoryRow, to_arrival, to_rows
from store.verify import verify
from tests.building import bush, scored_leaves
from tests.store.making import MAP_SIZE, claim, closed, open_run, run_event, trained
from tests.strategies import GroupShape, group_records

Export = Callable[[Log, Path], int]
FORMATS = [
    pytest.param(export_bundles, import_bundles, id="bundle"),
    pytest.param(export_jsonl, import_jsonl, id="jsonl"),
    pytest.param(export_parquet, import_parquet, id="parquet"),
]


@pytest.fixture
def source(tmp_path: Path) -> Iterator[Log]:
    """Return a log with trained, closed, dropped, aborted, re-opened, open and branching groups."""
    with open_run(tmp_path / "source") as log:
        _branching(log)
        trained(log, 0)
        log.journal.append_sync([GroupDropped(uid=closed(log)[0].uid, reason="no_signal")])
        log.groups.abort_sync(claim(log), "weights_expired", 1.0)
        closed(log)
        log.groups.abort_sync(claim(log), "hopeless", 1.0, final=True)
        claim(log)
        yield log


def _branching(log: Log) -> None:
    """Write a group of one tree with four leaves, and close it."""
    group = claim(log)
    tree = bush((1.0, 0.0, 0.5, 0.0), ticket=group.ticket)
    events: dict[int, list[GroupEvent]] = {}
    for number, event in tree.records:
        events.setdefault(number, []).append(event)
    log.groups.append_sync(group, [StreamWrite(number, 0, theirs) for number, theirs in events.items()])
    log.groups.close_sync(group, scored_leaves(tree.group()), 1.0)


def complete(log: Log) -> dict[str, tuple[Group, tuple[object, ...], str]]:
    """Return every complete group: folded, its members, its digest."""
    found = {}
    for row in log.group_rows():
        if row.fate not in {GroupFate.OPEN, GroupFate.ABORTED}:
            records = log.groups.fetch(row.uid).records
            group = fold_group((record.tree, record.event) for record in records)
            found[row.uid] = (group, row.chosen, row.digest)
    return found


def datum_digests(log: Log) -> tuple[str, ...]:
    """Return the digests of the datums of all complete groups as one step, by the fullest estimator."""
    groups = [(group, chosen) for group, chosen, _ in complete(log).values()]
    return build_step(groups, BatchSettings(estimator="node")).digests()  # type: ignore[arg-type]


@pytest.mark.parametrize(("export", "enter"), FORMATS)
def test_an_export_enters_a_fresh_log(source: Log, tmp_path: Path, export: Export, enter: Export) -> None:
    """The datums are the same in every format; the books of the new log are complete."""
    path = tmp_path / "out"
    assert export(source, path) > 0
    assert path.stat().st_mode & 0o777 == 0o600
    with open_log(tmp_path / "target", create=True, role="rollout", map_size=MAP_SIZE) as log:
        assert enter(log, path) == len(complete(source))
        assert log.run_event() == source.run_event()
        assert datum_digests(log) == datum_digests(source) != ()
        fates = {row.uid: row.fate for row in log.group_rows()}
        assert [uid for uid, fate in fates.items() if fate is GroupFate.DROPPED] == ["000003.0"]
        assert fates["000004.0"] is GroupFate.ABORTED
        assert fates["000004.1"] is GroupFate.CLOSED
        with pytest.raises(StoreError, match="fresh log"):
            enter(log, path)
    assert verify(tmp_path / "target") == []


def test_bundles_keep_group_digests(source: Log, tmp_path: Path) -> None:
    """Every byte of every record survives, sealed or not."""
    export_bundles(source, tmp_path / "out")
    with open_log(tmp_path / "target", create=True, role="rollout", map_size=MAP_SIZE) as log:
        import_bundles(log, tmp_path / "out")
        assert complete(log) == complete(source)


def test_rows_stand_alone(source: Log, tmp_path: Path) -> None:
    """A line of JSON holds tokens, logprobs, mask, reward and ids."""
    export_jsonl(source, tmp_path / "out.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert {row["uid"] for row in rows} == set(complete(source))
    for row in rows:
        assert len(row["tokens"]) == len(row["logprobs"]) == len(row["mask"])
        assert [
            value
            for value, sampled in zip(row["logprobs"], row["mask"], strict=True)
            if not sampled and value
        ] == []
        assert row["reward"] == row["score"]["value"]
    assert json.loads((tmp_path / "out.jsonl.run.json").read_text())["run_id"] == "run-1"


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(records=group_records(1, GroupShape(references=True)), data=st.data())
def test_rows_give_the_same_datums_for_any_group(
    records: list[tuple[int, GroupEvent]], data: st.DataObject
) -> None:
    """Chains and trees, voids, rewritten prompts and reference logprobs survive the way through rows."""
    group = fold_group(records)
    chosen = scored_leaves(group)
    passport = Passport(uid=group.uid, policy_version=0, weights_uri="", opened_at_step=0, chosen=chosen)
    rows = list(to_rows(group, passport))
    if not chosen:
        return
    arrival = to_arrival(rows)
    back = fold_group((record.tree, decode(record.raw)) for record in arrival.records)
    for name in ("group_mean", "tree", "node"):
        how = BatchSettings(
            estimator=name,
            kl_beta=0.1,
            prefix_weight=data.draw(st.sampled_from(["each", "once", "once_sum"])),
        )
        assert (
            build_step([(back, arrival.passport.chosen)], how).digests()
            == build_step([(group, chosen)], how).digests()
        )
    assert list(to_rows(back, arrival.passport)) == rows


def decode(raw: bytes) -> GroupEvent:
    """Return a group's event."""
    from store.codec import decode_group

    return decode_group(raw)


def test_a_cut_or_changed_bundle_file_is_refused(source: Log, tmp_path: Path) -> None:
    """Its end says how many groups there are, and their hash; nothing is entered before all is checked."""
    export_bundles(source, tmp_path / "good")
    content = (tmp_path / "good").read_bytes()
    bad = {
        "another format": b"{}" + content,
        "cut in a frame": content[:-5],
        "cut between frames": content[: -(content[::-1].index(b"dne") + 3 + 12)],
        "flipped": content[:300] + bytes([content[300] ^ 1]) + content[301:],
        "no run": content[:19] + content[content.index(b"group", 40) - 100 :],
    }
    with open_log(tmp_path / "target", create=True, role="rollout", map_size=MAP_SIZE) as log:
        for name, damaged in bad.items():
            (tmp_path / "bad").write_bytes(damaged)
            with pytest.raises(DataError):
                import_bundles(log, tmp_path / "bad")
            assert log.run_event() is None, name


def test_bad_rows_are_named(source: Log, tmp_path: Path) -> None:
    """A line that is no row, rows that contradict each other, a missing run."""
    path = tmp_path / "out.jsonl"
    export_jsonl(source, path)
    lines = path.read_text().splitlines()
    row = json.loads(lines[0])
    changes = [
        ("not json", "line 1"),
        (json.dumps(row | {"tokens": row["tokens"][:-1]}), "expected equal"),
        (json.dumps(row | {"leaf": "9.9.9"}), "not its end"),
    ]
    for number, (line, says) in enumerate(changes):
        path.write_text("\n".join([line, *lines[1:]]))
        with (
            open_log(tmp_path / f"t{number}", create=True, role="rollout", map_size=MAP_SIZE) as log,
            pytest.raises(DataError, match=says),
        ):
            import_jsonl(log, path)
    second = json.loads(lines[1])
    path.write_text(lines[0] + "\n" + json.dumps(second | {"tokens": [9, *second["tokens"][1:]]}))
    with open_log(tmp_path / "t9", create=True, role="rollout", map_size=MAP_SIZE) as log:
        with pytest.raises(DataError, match="another prompt"):
            import_jsonl(log, path)
        (tmp_path / "out.jsonl.run.json").unlink()
        with pytest.raises(DataError, match="cannot read the run"):
            import_jsonl(log, path)
        with pytest.raises(DataError, match="not a Parquet export"):
            import_parquet(log, path)


def test_what_enters_must_be_in_order_and_what_it_was(source: Log, tmp_path: Path) -> None:
    """A group given twice, or with another digest, is refused."""
    row = source.group("000001.0")
    passport = Passport(uid=row.uid, policy_version=0, weights_uri="", opened_at_step=0, chosen=row.chosen)
    arrival = Arrival(passport=passport, records=tuple(source.groups.fetch_raw(row.uid)), digest=row.digest)
    with open_run(tmp_path / "target") as log, pytest.raises(StoreError, match="given twice"):
        enter_groups(log, [arrival, arrival])
    with open_run(tmp_path / "other") as log, pytest.raises(StoreError, match="arrived with digest"):
        enter_groups(log, [Arrival(passport=passport, records=arrival.records, digest="0" * 64)])


def test_an_export_needs_a_run(tmp_path: Path) -> None:
    """An empty log has nothing to export, and no file is left."""
    with open_log(tmp_path / "run", create=True, role="rollout", map_size=MAP_SIZE) as log:
        for export in (export_bundles, export_jsonl, export_parquet):
            with pytest.raises(StoreError, match="holds no run"):
                export(log, tmp_path / "out")
        log.open_run(run_event())
        assert export_bundles(log, tmp_path / "out") == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "run"]


def frames_of(path: Path) -> list[RunFrame | GroupFrame | EndFrame]:
    """Return the frames of an export."""
    return list(read_frames(path))


def write_frames(path: Path, frames: Sequence[object], *, end: bool = True) -> None:
    """Write frames as an export does, with a right end unless told otherwise."""
    digest = hashlib.sha256()
    with path.open("wb") as file:
        file.write(MAGIC)
        for frame in frames:
            body = frame if isinstance(frame, bytes) else msgspec.msgpack.encode(frame)
            framed = len(body).to_bytes(4, "little") + body
            digest.update(framed)
            file.write(framed)
        if end:
            groups = sum(isinstance(frame, GroupFrame) for frame in frames)
            body = msgspec.msgpack.encode(EndFrame(groups, digest.digest()))
            file.write(len(body).to_bytes(4, "little") + body)


def test_every_way_in_which_a_bundle_file_is_wrong_is_named(source: Log, tmp_path: Path) -> None:
    """Its frames may be whole and yet no export; nothing is entered then, and no other error is raised."""
    good, bad = tmp_path / "good", tmp_path / "bad"
    export_bundles(source, good)
    run, *groups, end = frames_of(good)
    group = groups[0]
    assert isinstance(group, GroupFrame)
    other = msgspec.structs.replace(group, digest="0" * 64)
    flat = msgspec.structs.replace(group, bundle=b"RTB1", records=())
    wrong: list[tuple[Sequence[object], bool, type[RolltapeError], str]] = [
        ([group, run], True, DataError, "does not start with a run"),
        ([run, *groups], False, DataError, f"cut short after {len(groups)} groups"),
        ([run, *groups[:-1], end], False, DataError, "its SHA-256 is not what its end says"),
        ([], False, DataError, "cut short after 0 groups"),
        ([], True, DataError, "does not start with a run"),
        ([run, b"\x81\xa1a" + b"\x91" * 100_000], True, DataError, "is damaged before byte"),
        ([run, b"\xc1"], True, DataError, "is damaged before byte"),
        ([run, other], True, StoreError, "arrived with digest"),
        ([run, flat], True, LogDamaged, "not a bundle"),
        ([run, group, group], True, StoreError, "given twice"),
        ([run, in_place_of(group, "777777777777.0")], True, StoreError, "after the one before it"),
        ([run, in_place_of(group, "000000.1048577")], True, StoreError, "after the one before it"),
        ([run, in_place_of(group, "zero")], True, FoldError, "not a uid"),
    ]
    for number, (frames, ended, error, says) in enumerate(wrong):
        write_frames(bad, frames, end=ended)
        with (
            open_log(tmp_path / str(number), create=True, role="rollout", map_size=MAP_SIZE) as log,
            pytest.raises(error, match=says),
        ):
            import_bundles(log, bad)
    bad.write_bytes(MAGIC + b"\xff\xff\xff\xff" + bytes(100))
    with pytest.raises(DataError, match="cut short at byte"):
        check_file(bad)


def in_place_of(group: GroupFrame, uid: str) -> GroupFrame:
    """Return the frame of a group under another uid."""
    return msgspec.structs.replace(group, passport=msgspec.structs.replace(group.passport, uid=uid))


def test_rows_in_rows_without_end_are_a_bad_line(source: Log, tmp_path: Path) -> None:
    """However deep a line's lists go, the error names the line; a run like that is named too."""
    path = tmp_path / "out.jsonl"
    export_jsonl(source, path)
    deep = b'{"uid": ' + b"[" * 100_000
    path.write_bytes(deep)
    with open_log(tmp_path / "target", create=True, role="rollout", map_size=MAP_SIZE) as log:
        with pytest.raises(DataError, match="line 1: not a trajectory row"):
            import_jsonl(log, path)
        (tmp_path / "out.jsonl.run.json").write_bytes(b'{"type": "run", "other": ' + b"[" * 100_000)
        with pytest.raises(DataError, match="cannot read the run"):
            import_jsonl(log, path)


def row_changes() -> list[tuple[str, Callable[[dict[str, Any]], object], str]]:
    """Return what makes a good row contradict itself, its group, or what a log can hold."""
    return [
        ("mask that is none", lambda row: row["mask"].__setitem__(0, 2), "in mask contradicts"),
        ("mask of a sampled token", lambda row: row["mask"].__setitem__(-1, 0), "in mask contradicts"),
        (
            "logprob of a prompt's token",
            lambda row: row["logprobs"].__setitem__(0, -1.0),
            "in logprobs contradicts",
        ),
        ("logprob above 0", lambda row: row["logprobs"].__setitem__(-1, 0.5), "hold 0.5 at offset"),
        ("reward without a score", lambda row: row.update(score=None), "in reward contradicts"),
        ("score without a reward", lambda row: row.update(reward=None), "in reward contradicts"),
        (
            "turn that takes the observation",
            lambda row: row["turns"][0].update(stop=33),
            "contradicts|expected",
        ),
        ("segments that are none", lambda row: row.update(segment_starts=[0, 0]), "segment_starts"),
        ("another question", lambda row: row.update(question="why?"), "in question contradicts"),
        ("dropped alone", lambda row: row.update(dropped="no_signal"), "in dropped contradicts"),
        ("tree of no key", lambda row: row.update(tree=65_536), "tree 65536, expected 1 to 65535"),
        ("the group's own stream", lambda row: row.update(tree=0), "tree 0, expected 1"),
        ("token of no vocabulary", lambda row: row["tokens"].__setitem__(0, 2**31), "no log can"),
        ("negative token", lambda row: row["tokens"].__setitem__(-1, -1), "no log can"),
        ("seed of no integer", lambda row: row["turns"][0].update(seed=2**64), "no log can"),
    ]


@pytest.mark.parametrize(("name", "edit", "says"), row_changes())
def test_rows_that_contradict_themselves_are_refused_and_named(
    source: Log, tmp_path: Path, name: str, edit: Callable[[dict[str, Any]], object], says: str
) -> None:
    """What a row says is entered whole or refused; nothing of it is passed over."""
    path = tmp_path / "out.jsonl"
    export_jsonl(source, path)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    theirs = [row for row in rows if row["uid"] == "000001.0"]
    assert len(theirs) == 2
    edit(theirs[1])
    if "token" in name and "prompt" not in name:
        edit(theirs[0])
    path.write_text("\n".join(map(json.dumps, rows)))
    with (
        open_log(tmp_path / "target", create=True, role="rollout", map_size=MAP_SIZE) as log,
        pytest.raises(DataError, match=says),
    ):
        import_jsonl(log, path)


def test_a_trajectory_that_is_given_twice_is_refused(source: Log, tmp_path: Path) -> None:
    """A line that was copied would count twice in its group."""
    path = tmp_path / "out.jsonl"
    export_jsonl(source, path)
    first, *others = path.read_text().splitlines()
    path.write_text("\n".join([first, first, *others]))
    with (
        open_log(tmp_path / "target", create=True, role="rollout", map_size=MAP_SIZE) as log,
        pytest.raises(DataError, match="given twice"),
    ):
        import_jsonl(log, path)


ODD = st.sampled_from(
    [
        None,
        0,
        -1,
        1,
        2,
        3,
        2**31,
        2**63,
        -(2**63),
        2**64,
        1.5,
        -0.5,
        1e308,
        "",
        "x",
        "0.0.0",
        "0.0.1",
        "1.0.0",
    ]
) | st.sampled_from(["000000.0", "000007.70000", [], [0], [1, 1], {}, True, "answered", "void_tool", "tree"])


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield where values stand in plain data, of long lists at their ends alone."""
    if at:
        yield at
    if isinstance(value, dict):
        for name, item in value.items():
            yield from places(item, (*at, name))
    elif isinstance(value, list):
        for number in sorted({0, 1, len(value) - 1} & set(range(len(value)))):
            yield from places(value[number], (*at, number))


@settings(max_examples=200, suppress_health_check=[HealthCheck.too_slow])
@given(records=group_records(1, GroupShape(references=True)), data=st.data())
def test_a_row_changed_anywhere_is_refused_or_kept_whole(
    records: list[tuple[int, GroupEvent]], data: st.DataObject
) -> None:
    """Whatever stands in a column: one of our errors, or a group that gives the same rows."""
    group = fold_group(records)
    chosen = scored_leaves(group)
    passport = Passport(uid=group.uid, policy_version=0, weights_uri="", opened_at_step=0, chosen=chosen)
    plain = msgspec.to_builtins(list(to_rows(group, passport)))
    *where, last = data.draw(st.sampled_from(list(places(plain))).filter(lambda place: len(place) > 1))
    holder = plain
    for step in where:
        holder = holder[step]
    holder[last] = data.draw(ODD)
    try:
        rows = msgspec.convert(plain, list[TrajectoryRow])
    except msgspec.ValidationError:
        return
    with contextlib.suppress(RolltapeError):
        arrival = checked_arrival(rows)
        back = fold_group((record.tree, decode(record.raw)) for record in arrival.records)
        assert list(to_rows(back, arrival.passport)) == rows
        assert seal_group(arrival.records).digest
