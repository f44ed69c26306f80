"""Owns the end of a trajectory as events: how it ended, and what its scorer says of it."""

from core.events import VOID_OUTCOMES, Answered, GroupEvent, Rewarded
from core.ids import NodeId, parse_node
from core.tree import Group, Trajectory, fold_group, trajectory
from rollout.reward import Scorer
from rollout.turns import End


def end_events(scorer: Scorer, group: Group, tree: int, tip: NodeId, end: End) -> list[GroupEvent]:
    """Return the end of the branch at `tip` and, unless it is void, its rewards: one transaction's events.

    Raises RewardError when the scorer returns no finite number.
    """
    answered = Answered(
        leaf=tip,
        outcome=end.outcome,
        answer=end.answer,
        text=group.trees[tree].nodes[tip].sample.text,
        detail=end.detail,
    )
    if end.outcome in VOID_OUTCOMES:
        return [answered]
    ended = fold_group([(tree, answered)], onto=group)
    return [answered, *reward_events(scorer, trajectory(ended, tree, tip))]


def reward_events(scorer: Scorer, ended: Trajectory) -> list[GroupEvent]:
    """Return the rewards of an ended trajectory: its leaf's, and those of turns that the scorer names.

    A turn's reward comes from the trajectory of its own branch alone, so that leaves which share it cannot
    contradict each other, whichever is scored first.
    """
    score = scorer.score(ended)
    common = {
        "scorer": scorer.id,
        "scorer_version": scorer.version,
        "source_digest": scorer.source_digest,
    }
    branch = parse_node(ended.leaf)[:2]
    own = {step.node for step in ended.path if parse_node(step.node)[:2] == branch}
    return [
        Rewarded(node=ended.leaf, value=score.value, components=score.components, **common),
        *(
            Rewarded(node=node.node, value=node.value, components=node.components, scope="node", **common)
            for node in score.nodes
            if node.node in own
        ),
    ]
