"""Events as stored bytes: every type there and back, from a later release, from an earlier one, damaged."""

import contextlib
import json
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.errors import LogDamaged, LogTooNew
from core.events import (
    SCHEMA_VERSION,
    GoalSet,
    GroupDropped,
    GroupEvent,
    JournalEvent,
    TurnSampled,
)
from store import codec, keys
from store.keys import Table
from tests.examples import GROUP_EXAMPLES, JOURNAL_EXAMPLES
from tests.strategies import GROUP_EVENT_TYPES, JOURNAL_EVENT_TYPES, events_of

FIXTURES = Path(__file__).with_name("fixtures")
STORED: dict[str, dict[str, str]] = json.loads((FIXTURES / "stored_values.json").read_text())
"""Schema -> name of an example -> its whole stored value in hexadecimal, as that schema's release wrote it."""
FIRST_SCHEMA = 1
ALL_TYPES = (*GROUP_EVENT_TYPES, *JOURNAL_EVENT_TYPES)
Event = JournalEvent | GroupEvent


def decode(raw: bytes, event: Event, schema: int = SCHEMA_VERSION) -> Event:
    """Return what the decoder for that kind of event makes of bytes."""
    kind = codec.decode_group if isinstance(event, GROUP_EVENT_TYPES) else codec.decode_journal
    return kind(raw, schema)


def enlarged(event: Event, times: int) -> Event:
    """Return the event with its texts and bytes that many times as long."""
    values = {name: getattr(event, name) for name in event.__struct_fields__}
    long = {name: value * times for name, value in values.items() if type(value) in {str, bytes}}
    return msgspec.structs.replace(event, **long)


@pytest.mark.parametrize("kind", ALL_TYPES)
@given(data=st.data(), times=st.sampled_from([0, 1, 1, 40, 30_000]))
def test_every_event_comes_back_from_its_stored_value(kind: type, data: st.DataObject, times: int) -> None:
    """Through encoding, checksum and decoding: empty, small and large fields of any text."""
    event = enlarged(data.draw(events_of(kind)), times)
    table = Table.GROUPS if isinstance(event, GROUP_EVENT_TYPES) else Table.JOURNAL
    key = data.draw(st.binary(min_size=1, max_size=16))
    schema, raw = codec.unpack(table, key, codec.pack(table, key, codec.encode(event)))
    assert schema == SCHEMA_VERSION
    assert decode(raw, event) == event
    if isinstance(event, GROUP_EVENT_TYPES):
        assert codec.decode_all([raw, raw], [schema, schema]) == [event, event]


def from_a_later_release(value: Any) -> Any:
    """Return a value as plain data, with a field more in every map that stands for a Struct."""
    if isinstance(value, msgspec.Struct):
        plain = {field.encode_name: getattr(value, field.name) for field in msgspec.structs.fields(value)}
        plain = {name: from_a_later_release(item) for name, item in plain.items()}
        tag = value.__struct_config__.tag
        return {"of_tomorrow": {"deep": [1, b"\xff", None]}} | ({"type": tag} if tag else {}) | plain
    if isinstance(value, tuple):
        return [from_a_later_release(item) for item in value]
    return value


@pytest.mark.parametrize("kind", ALL_TYPES)
@given(data=st.data())
def test_fields_of_a_later_release_are_passed_over(kind: type, data: st.DataObject) -> None:
    """An event with fields that this release does not know, also inside its parts, is read all the same."""
    event = data.draw(events_of(kind))
    raw = msgspec.msgpack.encode(from_a_later_release(event))
    assert b"of_tomorrow" in raw
    assert decode(raw, event) == event


@pytest.mark.parametrize("schema", range(FIRST_SCHEMA, SCHEMA_VERSION + 1))
def test_every_schema_has_stored_values_of_every_event(schema: int) -> None:
    """A new event type, or a new schema, needs its bytes here before it is released."""
    stored = STORED[str(schema)]
    tags = {msgspec.msgpack.decode(bytes.fromhex(value)[6:])["type"] for value in stored.values()}
    assert stored.keys() == GROUP_EXAMPLES.keys() | JOURNAL_EXAMPLES.keys()
    if schema == SCHEMA_VERSION:
        kinds = (*get_args(GroupEvent), *get_args(JournalEvent))
        assert tags == {kind.__struct_config__.tag for kind in kinds}


@pytest.mark.parametrize(
    ("schema", "name"), [(schema, name) for schema, values in STORED.items() for name in values]
)
def test_stored_values_are_read_for_ever(schema: str, name: str) -> None:
    """The bytes that a release wrote, checksum included, give the event that it wrote them from."""
    event = GROUP_EXAMPLES.get(name) or JOURNAL_EXAMPLES[name]
    table = Table.GROUPS if name in GROUP_EXAMPLES else Table.JOURNAL
    found = codec.unpack(table, name.encode(), bytes.fromhex(STORED[schema][name]))
    assert found.schema == int(schema)
    assert decode(found.body, event, found.schema) == event


def rename_goal(plain: dict[str, object]) -> dict[str, object]:
    """Turn a goal of a made schema, in which it was called `steps`, into one of the next."""
    return {name: value for name, value in plain.items() if name != "steps"} | {"max_steps": plain["steps"]}


def double_goal(plain: dict[str, object]) -> dict[str, object]:
    """Turn a goal that was counted in pairs into one that is counted in steps."""
    assert isinstance(plain["max_steps"], int)
    return plain | {"max_steps": 2 * plain["max_steps"]}


def test_an_older_event_is_brought_up_one_schema_at_a_time() -> None:
    """Each step is applied once, in order, to its own tag alone; the result is a current event."""
    table = {("run_goal", 1): rename_goal, ("run_goal", 3): double_goal}
    raw = msgspec.msgpack.encode({"type": "run_goal", "steps": 4, "at": 2.0})
    plain = codec.upcast(raw, 1, table, current=5)
    assert msgspec.convert(plain, JournalEvent) == GoalSet(max_steps=8, at=2.0)
    assert codec.upcast(codec.encode(GoalSet(max_steps=4)), 2, table, current=5)["max_steps"] == 8
    assert codec.upcast(codec.encode(GoalSet(max_steps=4)), 4, table, current=5)["max_steps"] == 4
    other = codec.encode(GroupDropped(uid="000001.0", reason="steps"))
    assert codec.upcast(other, 1, table, current=5) == msgspec.msgpack.decode(other)


@given(data=st.data())
def test_records_of_an_earlier_schema_without_an_upcast_are_read_as_they_are(data: st.DataObject) -> None:
    """A tag without an entry is unchanged between two schemas."""
    earlier = SCHEMA_VERSION - 1
    for kind, reader in (
        (GROUP_EVENT_TYPES, codec.decode_group),
        (JOURNAL_EVENT_TYPES, codec.decode_journal),
    ):
        event = data.draw(events_of(data.draw(st.sampled_from(kind))))
        raw = codec.encode(event)
        assert reader(raw, earlier) == event
        if kind is GROUP_EVENT_TYPES:
            assert codec.decode_all([raw, raw], [earlier, SCHEMA_VERSION]) == [event, event]


def test_a_record_of_a_later_schema_asks_for_an_upgrade() -> None:
    """It is not guessed at."""
    raw = codec.encode(GoalSet(max_steps=1))
    for reader in (codec.decode_journal, codec.decode_group):
        with pytest.raises(LogTooNew, match="upgrade rolltape"):
            reader(raw, SCHEMA_VERSION + 1)
    with pytest.raises(LogTooNew, match="upgrade rolltape"):
        codec.decode_all([raw], [SCHEMA_VERSION + 1])


DEEP = b"\x81\xa1a" + b"\x91" * 100_000
"""A map with lists in lists: more of them than any reader follows."""


@pytest.mark.parametrize("schema", [SCHEMA_VERSION - 1, SCHEMA_VERSION])
def test_lists_in_lists_without_end_are_damage(schema: int) -> None:
    """Depth is not followed until the stack is used up."""
    for reader in (codec.decode_journal, codec.decode_group):
        with pytest.raises(LogDamaged, match="not a"):
            reader(DEEP, schema)
    with pytest.raises(LogDamaged):
        codec.decode_all([DEEP], [schema])


@given(raw=st.binary(max_size=60), schema=st.integers(SCHEMA_VERSION - 1, SCHEMA_VERSION))
def test_bytes_that_are_no_event_are_damage(raw: bytes, schema: int) -> None:
    """Whatever the bytes are, no other error leaves the decoder."""
    for reader in (codec.decode_journal, codec.decode_group):
        with pytest.raises(LogDamaged, match="not a"):
            reader(raw, schema)
    with pytest.raises(LogDamaged):
        codec.decode_all([raw], [schema])


@given(data=st.data())
def test_a_changed_event_is_damage_or_another_event(data: st.DataObject) -> None:
    """Where the checksum was made anew, a changed byte gives an event or LogDamaged, never anything else."""
    event = data.draw(events_of(data.draw(st.sampled_from(ALL_TYPES))))
    raw = bytearray(codec.encode(event))
    place = data.draw(st.integers(0, len(raw) - 1))
    raw[place] = data.draw(st.integers(0, 255))
    with contextlib.suppress(LogDamaged):
        assert type(decode(bytes(raw), event)) in ALL_TYPES


@given(
    table=st.sampled_from(Table),
    key=st.binary(min_size=1, max_size=16),
    body=st.binary(max_size=50),
    data=st.data(),
)
def test_a_stored_value_vouches_for_table_key_and_every_bit(
    table: Table, key: bytes, body: bytes, data: st.DataObject
) -> None:
    """A flipped bit, a cut, another key or another table: damaged."""
    value = codec.pack(table, key, body)
    assert codec.unpack(table, key, value) == (SCHEMA_VERSION, body)
    flipped = bytearray(value)
    bit = data.draw(st.integers(0, 8 * len(value) - 1))
    flipped[bit // 8] ^= 1 << bit % 8
    other = data.draw(st.sampled_from([each for each in Table if each is not table]))
    moved = bytearray(key)
    moved[-1] ^= 1 << data.draw(st.integers(0, 7))
    cut = value[: data.draw(st.integers(0, len(value) - 1))]
    for where, name, what in (
        (table, key, bytes(flipped)),
        (other, key, value),
        (table, bytes(moved), value),
        (table, key, cut),
    ):
        with pytest.raises(LogDamaged, match="checksum"):
            codec.unpack(where, name, what)


def test_numbers_that_are_no_numbers_are_stored_as_they_are() -> None:
    """What a codec is given it gives back bit for bit, NaNs with a payload too; refusing them is done before."""
    bits = bytes.fromhex("0100c07f 010080ff 000080ff 00000080".replace(" ", ""))
    event = msgspec.structs.replace(GROUP_EXAMPLES["sample"], tokens=bits, sampled_logprobs=bits)
    found = codec.decode_group(codec.encode(event))
    assert isinstance(found, TurnSampled)
    assert (found.tokens, found.sampled_logprobs) == (bits, bits)


@given(
    ticket=st.integers(0, 2**64 - 1),
    attempt=st.integers(0, keys.MAX_ATTEMPT),
    tree=st.integers(0, keys.MAX_TREE),
    index=st.integers(0, keys.MAX_INDEX),
)
def test_keys_sort_as_what_they_name(ticket: int, attempt: int, tree: int, index: int) -> None:
    """A group is one stretch of keys, a tree of it is one, and positions count up inside."""
    prefix = keys.group_prefix(f"{ticket:06d}.{attempt}")
    key = keys.group_key(prefix, tree, index)
    assert keys.parse_group_key(key) == (ticket, attempt, tree, index)
    assert keys.parse_bundle_key(keys.bundle_key(prefix, tree)) == (ticket, attempt, tree)
    assert prefix <= key < keys.after(key) <= keys.after(prefix)
    assert keys.after(b"\xff" * 16) > b"\xff" * 16 + b"\xff"
    for parse in (keys.parse_group_key, keys.parse_bundle_key, keys.parse_journal_key, keys.parse_group_view):
        with pytest.raises(LogDamaged, match="a key of"):
            parse(key + b"\x00")
