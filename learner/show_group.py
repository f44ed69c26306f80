"""Owns the look at one group in a terminal: its trees, turns with their advantage, leaves with their end."""

from collections.abc import Sequence
from typing import Final

from rich.console import Console
from rich.text import Text
from rich.tree import Tree as Branches

from core.config import from_plain
from core.errors import CodeNotAllowed
from core.ids import NodeId
from core.nodes import Node, Tree
from core.tree import Group, Trajectory
from learner.batch import Recipe, fold_bundle, recipe_from_learner, take
from learner.page.derive import Derived, derive_credit
from learner.page.steps import FORMULAS
from learner.rebuild import CodeLoader, Rebuilt, derive, no_code, rebuild, user_estimator
from learner.visible import one_line, visible
from store.log import Log
from store.ports import GroupFate, GroupRow

TEXT_WIDTH: Final = 64


def show_group(log: Log, uid: str, console: Console, *, load: CodeLoader = no_code) -> None:
    """Print one group: question, books, trees.

    Advantages are those of its step, or, for a closed group that no step has taken yet, what the run's
    settings make of it. Raises StoreError (no such group), LogDamaged or FoldError.
    """
    row = log.group(uid)
    bundle = log.groups.fetch(uid)
    if not bundle.records:
        console.print(Text(f"group {uid}: {row.fate.value}, nothing recorded yet"))
        return
    group = fold_bundle(bundle)
    try:
        rebuilt = _rebuilt(log, row, load)
        note = "" if rebuilt else f"no advantages: the group is {row.fate.value}"
    except CodeNotAllowed as error:
        rebuilt, note = None, str(error)
    derived = derive_credit(rebuilt.batch, rebuilt.recipe.settings) if rebuilt else None
    console.print(_headline(group, row, rebuilt, note))
    for tree in group.trees.values():
        console.print(_branches(group, tree, derived))


def _rebuilt(log: Log, row: GroupRow, load: CodeLoader) -> Rebuilt | None:
    if row.step is not None:
        return rebuild(log, log.plan(row.step), load)
    opened = log.run_event()
    if row.fate is not GroupFate.CLOSED or opened is None:
        return None
    learner = from_plain(opened.config).learner
    recipe: Recipe = recipe_from_learner(
        learner, learner.learning_rate, user_estimator(learner.estimator, load)
    )
    return derive([take(row, log.groups.fetch(row.uid))], recipe)


def _headline(group: Group, row: GroupRow, rebuilt: Rebuilt | None, note: str) -> Text:
    asked = group.asked
    text = Text()
    text.append(f"{group.uid}", style="bold")
    place = "" if row.step is None else f" in step {row.step}"
    facts = [f"{row.fate.value}{place}", asked.data_source, f"policy v{asked.policy_version}", row.reason]
    text.append("  " + " · ".join(one_line(fact, 60) for fact in facts if fact) + "\n", style="dim")
    text.append(visible(asked.question), style="bold")
    text.append(f"\nexpected: {visible(' | '.join(asked.references))}\n")
    if rebuilt is not None:
        estimator = rebuilt.recipe.settings.estimator
        text.append(f"{one_line(estimator, 60)}: {FORMULAS.get(estimator, 'user code')}", style="dim")
    elif note:
        text.append(visible(note), style="yellow")
    return text


def _branches(group: Group, tree: Tree, derived: Derived | None) -> Branches:
    root = Branches(Text(f"t{tree.index}", style="dim"), guide_style="dim")
    places: dict[NodeId | None, Branches] = {None: root}
    waiting = list(tree.children(None))
    while waiting:
        node = waiting.pop(0)
        places[node.node] = places[node.parent].add(_label(group, tree, node, derived))
        waiting.extend(tree.children(node.node))
    for name, ended in tree.unborn.items():
        root.add(
            Text(f"{name} {ended.outcome.value}: never sampled {one_line(ended.detail, 60)}", style="dim")
        )
    return root


def _label(group: Group, tree: Tree, node: Node, derived: Derived | None) -> Text:
    text = Text(no_wrap=True, overflow="ellipsis")
    text.append(f"{node.node} ", style="dim")
    credit = derived.nodes.get((group.uid, tree.index, node.node)) if derived else None
    if credit is not None:
        text.append(f"{credit.advantage:+.3f} ", style=advantage_style(credit.advantage))
    if node.tool_call is not None:
        arguments = " ".join(str(value) for value in node.tool_call.arguments.values())
        text.append(f"{one_line(node.tool_call.tool, 20)} ", style="cyan")
        text.append(one_line(arguments, TEXT_WIDTH))
    elif node.answer is None:
        text.append(node.observation.status if node.observation else "in flight", style="yellow")
    if node.answer is not None:
        text.append_text(_end(node))
    return text


def _end(node: Node) -> Text:
    assert node.answer is not None
    text = Text()
    value = None if node.reward is None else node.reward.value
    text.append("● " if value is not None else "○ ", style=reward_style(value))
    text.append("not scored " if value is None else f"{value:.2f} ")
    if node.answer.outcome.value != "answered":
        text.append(f"{node.answer.outcome.value} ", style="yellow")
    text.append(one_line(node.answer.answer or "", TEXT_WIDTH))
    return text


def reward_dots(ended: Sequence[Trajectory], limit: int = 16) -> Text:
    """Return one dot per ended trajectory, coloured by reward, at most `limit`."""
    text = Text()
    for one in ended[:limit]:
        text.append("○" if one.reward is None else "●", style=reward_style(one.reward))
    if len(ended) > limit:
        text.append(f"+{len(ended) - limit}", style="dim")
    return text


def reward_style(value: float | None) -> str:
    """Return the style of a reward: green above 0, red below, dim at 0 or without one."""
    if value is None or value == 0:
        return "dim"
    return "green" if value > 0 else "red"


def advantage_style(value: float) -> str:
    """Return the style of an advantage: blue above 0, orange below, dim at 0."""
    if value == 0:
        return "dim"
    return "dodger_blue1" if value > 0 else "dark_orange"
