"""Owns what a log tells that its model knows too."""

from typing import Any

import msgspec

from core.events import JournalEvent
from store.log import Log


def timeless(event: JournalEvent) -> JournalEvent:
    """Return a journal event without what the model does not know."""
    unknown = {"at": 0.0, "digest": "", "records": 0, "tokens_sampled": 0, "search_calls": 0}
    known = {name: value for name, value in unknown.items() if name in event.__struct_fields__}
    return msgspec.structs.replace(event, **known)


def told(log: Log) -> dict[str, Any]:
    """Return everything that the model knows too, as the log tells it."""
    rows = list(log.group_rows())
    state = log.state()
    return {
        "journal": [timeless(record.event) for record in log.journal.read()],
        "fates": {row.uid: row.fate.value for row in rows},
        "owners": {row.uid: (row.owner, row.worker) for row in rows},
        "streams": {row.uid: streams_of(log, row.uid) for row in rows},
        "next": [row.uid for row in log.next_step_groups(3)],
        "counters": (state.live_tickets, state.committed_steps, state.max_steps, state.next_ticket),
        "policy": (state.policy_version, state.weights_uri),
        "pinned": sorted(log.pinned_weights().items()),
    }


def streams_of(log: Log, uid: str) -> dict[int, list[object]]:
    """Return a group's events by tree."""
    streams: dict[int, list[object]] = {}
    for record in log.groups.fetch(uid).records:
        streams.setdefault(record.tree, []).append(record.event)
    return streams
