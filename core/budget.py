"""Owns what a run has cost so far, folded from its journal, and whether that exceeds its budget."""

from typing import NamedTuple

from core.config import BudgetSettings
from core.events import GroupAborted, GroupClosed, JournalEvent, Recovered, StepCommitted

MILLION = 1_000_000


class Spent(NamedTuple):
    """What the recorded history of a run has cost."""

    tokens_sampled: int = 0
    tokens_trained: int = 0
    search_calls: int = 0


def add(spent: Spent, event: JournalEvent) -> Spent:
    """Return the cost after one more journal event. Open groups count once they are closed."""
    match event:
        case GroupClosed() | GroupAborted():
            return spent._replace(
                tokens_sampled=spent.tokens_sampled + event.tokens_sampled,
                search_calls=spent.search_calls + event.search_calls,
            )
        case StepCommitted() | Recovered():
            return spent._replace(tokens_trained=spent.tokens_trained + event.tokens_trained)
        case _:
            return spent


def money(spent: Spent, budget: BudgetSettings) -> float:
    """Return the cost at the budget's prices, in their currency."""
    return (
        spent.tokens_sampled * budget.price_per_million_sampled / MILLION
        + spent.tokens_trained * budget.price_per_million_trained / MILLION
        + spent.search_calls * budget.price_per_search
    )


def exceeded(spent: Spent, budget: BudgetSettings) -> str:
    """Return which limit is reached, in words, or ""."""
    limits = (
        ("tokens_sampled", spent.tokens_sampled, budget.tokens_sampled),
        ("tokens_trained", spent.tokens_trained, budget.tokens_trained),
        ("search_calls", spent.search_calls, budget.search_calls),
        ("money", money(spent, budget), budget.money),
    )
    for name, value, limit in limits:
        if limit and value >= limit:
            return f"budget.{name} is used up: {value:,.10g} of {limit:,.10g}"
    return ""
