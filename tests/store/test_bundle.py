"""Bundles: sealing is undone byte for byte whatever a group holds, and damage is called damage."""

import contextlib
import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.arrays import pack_logprobs, pack_tokens
from core.errors import LogDamaged
from core.events import SCHEMA_VERSION, GroupEvent, Observed, ReferenceScored
from store import bundle, codec
from store.bundle import LOGPROBS, MIN_SPAN, TOKENS, find_spans, seal, seal_checked, unseal
from store.bundlefile import export_bundles, import_bundles
from store.copying import compact
from store.keys import Table
from store.log import Log, open_log
from store.ports import StreamWrite
from store.records import RawRecord
from store.sealing import INLINE, PAGE, PAGE_HEAD, cut
from store.verify import verify
from tests.examples import GROUP_EXAMPLES
from tests.store.making import CHOSEN, MAP_SIZE, asked, chain, claim, fill, open_run, sampled
from tests.strategies import GROUP_EVENT_TYPES, TEXTS, events_of

MAX_U32 = 2**32 - 1
LABELS = [
    bytes([0xA0 | len(name)]) + name.encode() + head
    for name in ("tokens", "sampled_logprobs", "prompt_reset", "prompt", "logprobs")
    for head in (b"\xc4\x10", b"\xc5\x01\x00", b"\xc6\x00\x01\x00\x00")
]
"""What stands before a span inside a record; here it is drawn as content."""

IDS = (
    st.integers(0, 1 << 16)
    | st.integers((1 << 18) - 2, (1 << 18) + 2)
    | st.integers(2**31 - 3, 2**31 - 1)
    | st.just(7)
)
NARROW = st.lists(st.integers(0, (1 << 18) - 1), max_size=40).map(pack_tokens)
WIDE = st.lists(IDS, max_size=40).map(pack_tokens)
REPEATED = st.builds(lambda one, times: pack_tokens([one] * times), IDS, st.integers(0, 300))
LABELLED = st.builds(
    lambda label, value, fill: (label + value) * 2 + bytes(fill),
    st.sampled_from(LABELS),
    st.binary(max_size=20),
    st.integers(0, 3),
)
SPANS = NARROW | WIDE | REPEATED | LABELLED | st.binary(max_size=40)
"""Bytes of tokens or logprobs: also of odd lengths, shorter than what is cut out, and NaNs with a payload."""


@st.composite
def drawn_events(draw: st.DrawFn) -> GroupEvent:
    """Draw a group's event with hard content."""
    same = draw(SPANS)
    spans = st.just(same) | SPANS
    match draw(st.integers(0, 4)):
        case 0:
            event = sampled(draw(st.integers(0, 9)))
            return msgspec.structs.replace(
                event, tokens=draw(spans), sampled_logprobs=draw(spans), text=draw(TEXTS)
            )
        case 1:
            tokens, reset = draw(spans), draw(st.none() | spans)
            return Observed(node="0.0.0", content=draw(TEXTS), tokens=tokens, prompt_reset=reset)
        case 2:
            return ReferenceScored(node="0.0.0", logprobs=draw(spans), base_model=draw(TEXTS))
        case 3:
            return msgspec.structs.replace(asked("000001.0"), prompt=draw(spans), question=draw(TEXTS))
        case _:
            return draw(events_of(draw(st.sampled_from(GROUP_EVENT_TYPES))))


def reordered(raw: bytes) -> bytes:
    """Return an event as a writer would store it that puts the fields in another order."""
    plain = msgspec.msgpack.decode(raw)
    return msgspec.msgpack.encode(dict(reversed(list(plain.items()))))


@st.composite
def drawn_groups(draw: st.DrawFn) -> list[RawRecord]:
    """Draw the records of a group, in key order."""
    places = draw(
        st.sets(
            st.tuples(st.integers(0, 3) | st.just(65_535), st.integers(0, 9) | st.just(MAX_U32)), min_size=1
        )
    )
    records = []
    for tree, position in sorted(places):
        raw = codec.encode(draw(drawn_events()))
        if draw(st.booleans()):
            raw = reordered(raw)
        records.append(RawRecord(tree, position, draw(st.integers(0, SCHEMA_VERSION)), raw))
    return records


@given(records=drawn_groups())
def test_unsealing_gives_back_every_byte(records: list[RawRecord]) -> None:
    """Any events, positions and schemas; tokens of any width and length; fields in any order."""
    assert unseal(seal(records)) == records
    assert seal_checked(records) == seal(records)


@given(event=drawn_events())
def test_spans_stand_where_they_say_and_do_not_overlap(event: GroupEvent) -> None:
    """Each is the bytes of one field of whole numbers, long enough to be worth it."""
    raw = codec.encode(event)
    end = 0
    for kind, offset, size in find_spans(raw, event):
        assert offset >= end
        assert size >= MIN_SPAN
        assert size % 4 == 0
        names = ("tokens", "prompt", "prompt_reset") if kind == TOKENS else ("sampled_logprobs", "logprobs")
        assert raw[offset : offset + size] in [getattr(event, name, None) for name in names]
        end = offset + size


def test_what_is_worth_it_is_cut_out() -> None:
    """Tokens, prompts and logprobs leave the remainder; too short ones and odd ones stay."""
    turn = sampled(0, tokens=2)
    assert [span.kind for span in find_spans(codec.encode(turn), turn)] == [TOKENS, LOGPROBS]
    short = sampled(0, tokens=1)
    assert find_spans(codec.encode(short), short) == []
    odd = msgspec.structs.replace(turn, tokens=turn.tokens + b"x", sampled_logprobs=bytes(7))
    assert find_spans(codec.encode(odd), odd) == []
    reset = Observed(node="0.0.0", content="", tokens=bytes(8), prompt_reset=bytes(8))
    assert [span.kind for span in find_spans(codec.encode(reset), reset)] == [TOKENS, TOKENS]
    for name in ("group", "tool_call", "answer", "reward", "expand"):
        event = GROUP_EXAMPLES[name]
        assert len(find_spans(codec.encode(event), event)) == (name == "group"), name


def test_a_label_inside_a_span_does_not_mislead() -> None:
    """Where tokens hold the bytes that announce the logprobs, the spans that would overlap are not both cut."""
    logprobs = pack_logprobs([-0.5] * 4)
    tokens = b"\xb0sampled_logprobs\xc4\x10" + logprobs + b"\x00"
    event = msgspec.structs.replace(sampled(0), tokens=tokens, sampled_logprobs=logprobs)
    records = [RawRecord(1, 0, SCHEMA_VERSION, codec.encode(event))]
    assert unseal(seal(records)) == records
    assert len(find_spans(records[0].raw, event)) == 1


@pytest.mark.parametrize("size", [60, 63, 64, 16_383, 16_384, 70_000])
@pytest.mark.parametrize("low", [0, 1 << 18])
def test_turns_of_every_length_form_are_sealed(size: int, low: int) -> None:
    """MessagePack's three forms of a length, and both widths of tokens."""
    ids = np.random.default_rng(size).integers(low, low + (1 << 18) - 1, size)
    event = msgspec.structs.replace(
        sampled(0), tokens=pack_tokens(ids), sampled_logprobs=pack_logprobs(-np.ones(size))
    )
    records = [RawRecord(1, 0, SCHEMA_VERSION, codec.encode(event))]
    blob = seal(records)
    assert unseal(blob) == records
    assert len(find_spans(records[0].raw, event)) == 2


def test_nothing_is_no_bundle() -> None:
    """A group without records has nothing to seal, and needs no bundle to be read."""
    assert seal_checked([]) is None


def group_of(seed: int = 1, tokens: int = 30) -> list[RawRecord]:
    """Return a group's records."""
    streams: Sequence[Sequence[GroupEvent]] = ([asked("000001.0")], chain(seed, tokens=tokens))
    return [
        RawRecord(tree, position, SCHEMA_VERSION, codec.encode(event))
        for tree, events in enumerate(streams)
        for position, event in enumerate(events)
    ]


def other_or_damaged(blob: bytes) -> bool:
    """Return whether a changed bundle is called damaged; fails on any other error."""
    found: list[RawRecord] | None = None
    with contextlib.suppress(LogDamaged):
        found = unseal(blob)
    assert found is None or all(isinstance(record, RawRecord) for record in found)
    return found is None


def test_every_value_of_every_header_byte_is_read_or_damage() -> None:
    """Magic, flags, counts and sizes, and the heads of the compressed blocks: no value gives another error."""
    blob = seal(group_of())
    damaged = 0
    for place in range(64):
        for value in range(256):
            damaged += other_or_damaged(blob[:place] + bytes([value]) + blob[place + 1 :])
    assert damaged > 28 * 200


def test_every_cut_is_damage() -> None:
    """A bundle cut anywhere is no bundle, and neither is one with something after it."""
    blob = seal(group_of())
    for size in range(len(blob)):
        assert other_or_damaged(blob[:size]), size
    assert other_or_damaged(blob + b"\x00" * 4)
    wide = [record for record in group_of() if record.tree]
    wide[0] = RawRecord(
        1,
        0,
        SCHEMA_VERSION,
        codec.encode(msgspec.structs.replace(sampled(0), tokens=pack_tokens([1 << 20] * 12))),
    )
    blob = seal(wide)
    assert unseal(blob) == wide
    assert all(other_or_damaged(blob[:size]) for size in range(len(blob)))


@given(content=st.binary(max_size=200), magic=st.booleans())
def test_bytes_that_are_no_bundle_are_damage(content: bytes, magic: bool) -> None:
    """Whatever they are."""
    assert other_or_damaged(bundle.MAGIC * magic + content)


def test_a_bundle_changed_anywhere_is_read_or_damage() -> None:
    """Whoever rewrites the checksums too gets other records or LogDamaged, never another error."""
    blob, draw = bytearray(seal(group_of())), random.Random(5)
    for _ in range(3_000):
        place, value = draw.randrange(len(blob)), draw.randrange(256)
        before, blob[place] = blob[place], value
        other_or_damaged(bytes(blob))
        blob[place] = before


@given(size=st.integers(1, 60_000))
def test_a_bundle_is_cut_to_fit_pages(size: int) -> None:
    """The parts are the bundle; all but the first fit twice into a leaf page, the first fills whole pages."""
    blob = random.Random(size).randbytes(size)
    parts = cut(blob)
    assert b"".join(parts) == blob
    assert all(len(part) + codec.HEAD_SIZE <= INLINE for part in parts[1:])
    if len(parts) > 1 and len(parts[0]) + codec.HEAD_SIZE > INLINE:
        assert (len(parts[0]) + codec.HEAD_SIZE + PAGE_HEAD) % PAGE == 0


def test_bundles_of_every_size_are_stored_and_read(tmp_path: Path) -> None:
    """From one part inside a page to many pages."""
    with open_run(tmp_path) as log:
        for tokens in (2, 100, 330, 700, 1_000, 20_000):
            group = claim(log)
            log.groups.append_sync(group, [StreamWrite(0, 0, [asked(group.uid)])])
            for tree in (1, 2):
                log.groups.append_sync(group, [StreamWrite(tree, 0, chain(tree, tokens=tokens))])
            before = log.groups.fetch(group.uid)
            assert log.groups.close_sync(group, CHOSEN, 1.0) == before.digest
            assert log.groups.fetch(group.uid) == before
    assert verify(tmp_path) == []


def forget_high_parts(tokens: "np.ndarray[tuple[int, ...], np.dtype[np.uint32]]") -> bytes:
    """Pack tokens as a faulty release might: without what stands above 16 bits."""
    return (tokens & 0xFFFF).astype("<u2").tobytes() + bytes(-(-tokens.size // 4))


def single_records(log: Log) -> int:
    """Return how many records stand unsealed."""
    with log._environment.read() as snapshot:
        return snapshot.count(Table.GROUPS)


def test_a_bundle_that_is_not_its_group_is_never_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a fault in the packing, groups stay unsealed: they close, are exported and entered, nothing is lost."""
    with open_run(tmp_path / "run") as log, monkeypatch.context() as fault:
        group = claim(log)
        fill(log, group)
        before = log.groups.fetch(group.uid)
        fault.setattr(bundle, "_narrow", forget_high_parts)
        assert seal_checked(log.groups.fetch_raw(group.uid)) is None
        assert log.groups.close_sync(group, CHOSEN, 1.0) == before.digest
        assert log.groups.fetch(group.uid) == before
        assert single_records(log) == len(before.records)
        assert export_bundles(log, tmp_path / "out") == 1
        with open_log(tmp_path / "other", create=True, role="rollout", map_size=MAP_SIZE) as other:
            assert import_bundles(other, tmp_path / "out") == 1
            assert single_records(other) == len(before.records)
            assert other.groups.fetch(group.uid) == before
    assert verify(tmp_path / "run") == []
    assert verify(tmp_path / "other") == []
    compact(tmp_path / "run")
    with open_run(tmp_path / "run") as log:
        assert single_records(log) == 0
        assert log.groups.fetch(group.uid) == before


def test_other_threads_seal_and_unseal_at_the_same_time() -> None:
    """The compressor's objects belong to one thread each."""
    groups = [group_of(seed, tokens=500) for seed in range(8)]
    with ThreadPoolExecutor(8) as pool:
        blobs = list(pool.map(seal, groups * 8))
        assert list(pool.map(unseal, blobs)) == groups * 8
