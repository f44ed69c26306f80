"""The stored form of every event: bytes written once must be read for ever."""

from typing import get_args

import msgspec
import pytest
from hypothesis import given

from core.events import VOID_OUTCOMES, GoalSet, GroupEvent, JournalEvent
from tests.examples import BYTES, GROUP_EXAMPLES, JOURNAL_EXAMPLES
from tests.strategies import GROUP_EVENT_TYPES, JOURNAL_EVENT_TYPES, group_events, journal_events

GROUP_DECODER = msgspec.msgpack.Decoder(GroupEvent)
JOURNAL_DECODER = msgspec.msgpack.Decoder(JournalEvent)


@pytest.mark.parametrize("name", GROUP_EXAMPLES)
def test_stored_group_bytes_are_read(name: str) -> None:
    """Bytes that schema version 1 stored decode to the event they were written from."""
    assert GROUP_DECODER.decode(bytes.fromhex(BYTES[name])) == GROUP_EXAMPLES[name]


@pytest.mark.parametrize("name", JOURNAL_EXAMPLES)
def test_stored_journal_bytes_are_read(name: str) -> None:
    """Bytes that schema version 1 stored decode to the event they were written from."""
    assert JOURNAL_DECODER.decode(bytes.fromhex(BYTES[name])) == JOURNAL_EXAMPLES[name]


@pytest.mark.parametrize("name", [*GROUP_EXAMPLES, *JOURNAL_EXAMPLES])
def test_the_same_map_is_still_written(name: str) -> None:
    """An event without newer fields is written as schema version 1 wrote it: defaults take no space.

    The maps are compared, not the bytes: msgspec writes a wider map header once a type has 16 fields.
    """
    event = GROUP_EXAMPLES.get(name) or JOURNAL_EXAMPLES[name]
    written = msgspec.msgpack.decode(msgspec.msgpack.encode(event))
    assert written == msgspec.msgpack.decode(bytes.fromhex(BYTES[name]))


def test_every_event_has_stored_bytes_and_a_strategy() -> None:
    """No event type is left out of the fixtures or of the strategies."""
    examples = {type(event) for event in (*GROUP_EXAMPLES.values(), *JOURNAL_EXAMPLES.values())}
    assert examples == {*get_args(GroupEvent), *get_args(JournalEvent)}
    assert set(GROUP_EVENT_TYPES) == set(get_args(GroupEvent))
    assert set(JOURNAL_EVENT_TYPES) == set(get_args(JournalEvent))
    assert BYTES.keys() == {*GROUP_EXAMPLES, *JOURNAL_EXAMPLES}


def test_a_field_from_the_future_is_skipped() -> None:
    """A newer writer's extra field does not stop an older reader."""
    stored = msgspec.msgpack.encode({"type": "run_goal", "max_steps": 3, "colour": "red"})
    assert JOURNAL_DECODER.decode(stored) == GoalSet(max_steps=3)


def test_void_outcomes_are_not_the_policys() -> None:
    """Exactly three outcomes are void."""
    assert {"void_tool", "void_engine", "cancelled"} == VOID_OUTCOMES


@given(group_events())
def test_group_events_round_trip(event: GroupEvent) -> None:
    """decode(encode(e)) == e for every group event."""
    assert GROUP_DECODER.decode(msgspec.msgpack.encode(event)) == event


@given(journal_events())
def test_journal_events_round_trip(event: JournalEvent) -> None:
    """decode(encode(e)) == e for every journal event."""
    assert JOURNAL_DECODER.decode(msgspec.msgpack.encode(event)) == event
