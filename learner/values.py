"""Owns the search for altered values: which reward, or which datum, field and token, and what it was.

The plan's sums suggest an original value; putting it back and meeting the recorded digest proves it.
"""

from collections.abc import Iterator

import msgspec
import numpy as np

from core.advantage import ESTIMATORS
from core.arrays import Int32
from core.batch import DatumKey
from core.datum import DatumArrays, datum_digest
from core.errors import RolltapeError
from core.tree import Trajectory
from learner import evidence
from learner.batch import Taken
from learner.difference import Decode, Difference, Scene
from learner.rebuild import derive

AROUND = 6
"""Tokens shown on either side of an altered one."""
ULPS = 4
"""Advantages this close in float32 differ by rounding."""

TOKENS, LOGPROBS, ADVANTAGES = "tokens", "logprobs", "advantages"


def rewards(scene: Scene) -> Iterator[Difference]:
    """Yield the altered reward, if the plan's sums point to one."""
    recorded = scene.planned.evidence
    if recorded is None or not recorded.rewards:
        return
    rewards = scene.rebuilt.batch.table.rewards
    hits = evidence.locate(recorded.rewards, evidence.reward_view(rewards))
    for hit in hits:
        member = scene.rebuilt.batch.members[hit.offset]
        value = evidence.unview_reward(hit.recorded)
        proven = _proves_reward(scene, member, value)
        if proven or len(hits) == 1:
            yield Difference(
                place=f"{member.tree_uid}/{member.leaf}",
                field="reward",
                recorded=repr(value),
                derived=repr(float(rewards[hit.offset])),
                around=member.ended.text[-80:],
                cause="the reward event was altered after training",
                proven=proven,
            )


def _proves_reward(scene: Scene, member: Trajectory, value: float) -> bool:
    taken = [
        _with_reward(one, member, value) if one.group.uid == member.group.uid else one
        for one in scene.rebuilt.taken
    ]
    try:
        return derive(taken, scene.rebuilt.recipe).batch_digest == scene.planned.batch_digest
    except RolltapeError:
        return False


def _with_reward(taken: Taken, member: Trajectory, value: float) -> Taken:
    tree = taken.group.trees[member.tree]
    node = tree.nodes[member.leaf]
    assert node.reward is not None
    scored = node._replace(reward=msgspec.structs.replace(node.reward, value=value))
    grown = msgspec.structs.replace(tree, nodes={**tree.nodes, member.leaf: scored})
    group = taken.group._replace(trees={**taken.group.trees, member.tree: grown})
    return taken._replace(group=group)


def datums(scene: Scene) -> Iterator[Difference]:
    """Yield the first differing datum, with its field and offset where the evidence gives them."""
    planned, rebuilt = scene.planned, scene.rebuilt
    differing = [
        position
        for position, pair in enumerate(zip(planned.datum_digests, rebuilt.digests, strict=False))
        if pair[0] != pair[1]
    ]
    if not differing and len(planned.datum_digests) == len(rebuilt.digests):
        return
    if len(planned.datum_digests) != len(rebuilt.digests):
        yield _datum_count(scene)
        return
    position = differing[0]
    key = rebuilt.batch.keys[position]
    others = f"; {len(differing) - 1} more datums differ" if len(differing) > 1 else ""
    for difference in _fields(scene, position, key):
        yield msgspec.structs.replace(difference, cause=difference.cause + others)


def _datum_count(scene: Scene) -> Difference:
    recorded = set(scene.planned.evidence.keys) if scene.planned.evidence else set()
    derived = {str(key) for key in scene.rebuilt.batch.keys}
    gone, new = sorted(recorded - derived), sorted(derived - recorded)
    return Difference(
        place=gone[0] if gone else new[0] if new and recorded else "batch",
        field="datums",
        recorded=f"{len(scene.planned.datum_digests)} datums",
        derived=f"{len(scene.rebuilt.digests)} datums",
        cause="other trajectories carry a signal: a reward, a chosen leaf or the estimator changed",
    )


def _fields(scene: Scene, position: int, key: DatumKey) -> Iterator[Difference]:
    recorded, datum = scene.planned.evidence, scene.rebuilt.batch.datums[position]
    place = f"datum {position} = {key}"
    if recorded is None or len(recorded.tokens) != evidence.SUM_BYTES * len(scene.rebuilt.digests):
        yield Difference(place=place, field="datum", cause=_cause(scene, "", 0.0, 0.0))
        return
    views = {
        TOKENS: (recorded.tokens, evidence.token_view(datum)),
        LOGPROBS: (recorded.logprobs, evidence.float_view(datum.logprobs)),
        ADVANTAGES: (recorded.advantages, evidence.float_view(datum.advantages)),
    }
    digest = scene.planned.datum_digests[position]
    rows = {field: evidence.row(packed, position) for field, (packed, _) in views.items()}
    if all(rows[field] == evidence.sums(view) for field, (_, view) in views.items()):
        cause = "its digest differs, its evidence does not: one of them was altered, or made by a bug"
        yield Difference(
            place=place, field="datum", recorded=digest, derived=datum_digest(datum), cause=cause
        )
        return
    for field, (_, view) in views.items():
        sums = rows[field]
        if sums == evidence.sums(view):
            continue
        hits = evidence.locate(sums, view)
        fixed = [hit for hit in hits if datum_digest(_put(datum, field, hit)) == digest]
        if hits:
            yield _one_value(scene, place, position, field, (fixed or hits)[0], proven=bool(fixed))
        else:
            yield _many_values(scene, place, position, field, sums)


def _put(datum: DatumArrays, field: str, hit: evidence.Located) -> DatumArrays:
    """Return the datum with one value replaced by what the plan's sums say it was."""
    inputs, targets = datum.inputs.copy(), datum.targets.copy()
    logprobs, advantages = datum.logprobs.copy(), datum.advantages.copy()
    match field:
        case "tokens":
            if hit.recorded >= 1 << 31:
                return datum
            if hit.offset < len(inputs):
                inputs[hit.offset] = hit.recorded
            if hit.offset:
                targets[hit.offset - 1] = hit.recorded
        case "logprobs":
            logprobs.view(np.uint32)[hit.offset] = hit.recorded & 0xFFFF_FFFF
        case _:
            advantages.view(np.uint32)[hit.offset] = hit.recorded & 0xFFFF_FFFF
    return DatumArrays(inputs, targets, logprobs, advantages)


def _one_value(
    scene: Scene, place: str, position: int, field: str, hit: evidence.Located, *, proven: bool
) -> Difference:
    datum = scene.rebuilt.batch.datums[position]
    if field == TOKENS:
        offset, recorded = hit.offset, _token(hit.recorded, scene.decode)
        derived = _token(int(evidence.token_view(datum)[hit.offset]), scene.decode)
        cause = "a token of a sample, an observation or the prompt was altered after training"
    else:
        offset, recorded = hit.offset + 1, repr(evidence.unview_float(hit.recorded & 0xFFFF_FFFF))
        values = datum.logprobs if field == LOGPROBS else datum.advantages
        derived = repr(float(values[hit.offset]))
        cause = f"one value of {field} was altered after training"
        if field == ADVANTAGES:
            cause = _cause(scene, field, float(recorded), float(derived))
    return Difference(
        place=place,
        field=field,
        offset=offset,
        recorded=recorded,
        derived=derived,
        around=_around(scene, position, offset),
        cause=cause,
        proven=proven,
    )


def _many_values(scene: Scene, place: str, position: int, field: str, sums: bytes) -> Difference:
    datum = scene.rebuilt.batch.datums[position]
    trained = scene.rebuilt.batch.segments[position].sampled[1:]
    first = int(np.argmax(trained)) + 1 if trained.any() else 0
    value = evidence.constant(sums, trained) if field == ADVANTAGES else None
    if value is None or value >= 1 << 32:
        cause = _cause(scene, field, 0.0, 1.0)
        return Difference(place=place, field=field, around=_around(scene, position, first), cause=cause)
    recorded, derived = evidence.unview_float(value), float(datum.advantages[first - 1])
    replaced = np.where(trained, np.float32(recorded), np.float32(0))
    proof = datum_digest(datum._replace(advantages=replaced)) == scene.planned.datum_digests[position]
    return Difference(
        place=place,
        field=f"{field} of all its trained tokens",
        offset=first,
        recorded=repr(recorded),
        derived=repr(derived),
        around=_around(scene, position, first),
        cause=_cause(scene, field, recorded, derived),
        proven=proof,
    )


def _cause(scene: Scene, field: str, recorded: float, derived: float) -> str:
    """Return the likeliest cause of a difference whose records are all the pinned ones, or not."""
    planned = scene.planned
    pinned = all(
        group.digest == taken.digest for group, taken in zip(planned.groups, scene.rebuilt.taken, strict=True)
    )
    if not pinned:
        return "it follows from the altered records"
    if field == ADVANTAGES:
        if abs(recorded - derived) <= ULPS * float(np.spacing(np.float32(max(abs(recorded), abs(derived))))):
            return "float rounding: equal up to the last bits" + _since(scene)
        other = _other_estimator(scene)
        if other:
            return f"the plan says estimator {planned.estimator!r}, but its batch was made by {other!r}"
    return "all records are the pinned ones, so the plan or the code was altered" + _since(scene)


def _since(scene: Scene) -> str:
    return f" (changed since: {'; '.join(scene.changes)})" if scene.changes else ""


def _other_estimator(scene: Scene) -> str:
    for name in ESTIMATORS:
        settings = msgspec.structs.replace(scene.rebuilt.recipe.settings, estimator=name, user=None)
        recipe = scene.rebuilt.recipe._replace(settings=settings)
        try:
            again = derive(list(scene.rebuilt.taken), recipe)
        except RolltapeError:
            continue
        if again.digests == scene.planned.datum_digests:
            return name
    return ""


def _token(value: int, decode: Decode | None) -> str:
    return f"{value} {decode([value])!r}" if decode is not None and value < 1 << 31 else str(value)


def _around(scene: Scene, position: int, offset: int) -> str:
    """Return the text around a token, spelled by the tokenizer or taken from the event it belongs to."""
    segment = scene.rebuilt.batch.segments[position]
    if scene.decode is not None:
        near: Int32 = segment.tokens[max(offset - AROUND, 0) : offset + AROUND + 1]
        return scene.decode(near.tolist())
    key = scene.rebuilt.batch.keys[position]
    member = next(
        one
        for one in scene.rebuilt.batch.members
        if (one.group.uid, one.tree, one.leaf) == (key.uid, key.tree, key.leaf)
    )
    index = int(segment.node_index[min(offset, len(segment.node_index) - 1)])
    return member.path[index].sample.text[:80] if index >= 0 else ""
