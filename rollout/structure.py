"""Owns whether a whole trajectory keeps its protocol's form, and whether its results held a reference.

For search_r1 every turn must be <think>…</think> followed by one action and nothing else; for the other
protocols every turn but the last must be a call that ran. Retrieved text is never read for tags: it is data.
"""

import re

from core.tree import Trajectory
from rollout.normalise import Rule

TAG = r"</?(?:think|search|information|answer)>"
_THOUGHT = rf"\s*<think>(?:(?!{TAG}).)*</think>\s*"
_SEARCHING = re.compile(rf"{_THOUGHT}<(\w+)>(?:(?!{TAG}).)*</\1>\s*", re.DOTALL)
_ANSWERING = re.compile(rf"{_THOUGHT}<answer>(?:(?!{TAG}).)*</answer>\s*", re.DOTALL)


def well_structured(trajectory: Trajectory) -> bool:
    """Tell whether every turn of an answered trajectory has the protocol's form."""
    *before, last = trajectory.path
    if any(node.tool_call is None for node in before):
        return False
    if trajectory.group.asked.protocol != "search_r1":
        return True
    return _ANSWERING.fullmatch(last.sample.text) is not None and all(
        _SEARCHING.fullmatch(node.sample.text) for node in before
    )


def found_reference(trajectory: Trajectory, rule: Rule) -> bool:
    """Tell whether a result that the policy read holds a reference, both normalised."""
    wanted = [said for each in trajectory.group.asked.references if (said := rule.normalise(each))]
    read = [
        rule.normalise(node.observation.content)
        for node in trajectory.path
        if node.observation is not None and node.tool_call is not None
    ]
    return any(reference in content for content in read for reference in wanted)
