"""Owns the tools that a policy may call: their declarations, and running them.

Running never raises: what fails outside the policy's power is `ok=False`; what the policy did wrong (an
expression that cannot be computed) is an answer like any other.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple, Protocol

from core.config import ToolSettings
from core.errors import ConfigError
from rollout.calculator import calculate
from rollout.observations import Block, plain_block
from rollout.search.build import build_backend
from rollout.search.index import Notify
from rollout.search.render import show
from rollout.search.service import Cache, SearchService
from rollout.toolspec import Scalar, ToolCall, ToolSpec

__all__ = ["Calculator", "SearchTool", "Tool", "ToolCall", "ToolResult", "ToolSpec", "build_tools"]


class ToolResult(NamedTuple):
    """What a tool answered, or why it could not."""

    blocks: tuple[Block, ...]
    """What the policy reads; after a fault, a notice for `on_fault = observe`."""
    ok: bool = True
    status: str = "success"
    error: str = ""
    latency: float = 0.0
    """Seconds."""
    backend: str = ""
    cached: bool = False
    document_ids: tuple[str, ...] = ()
    fatal: bool = False
    """No later call can succeed either: the run should stop and say why."""


class Tool(Protocol):
    """A tool that can be declared and run."""

    spec: ToolSpec

    async def run(self, arguments: Mapping[str, Scalar]) -> ToolResult:
        """Run a call whose arguments fit the schema; never raises on a fault."""
        ...

    async def aclose(self) -> None:
        """Release connections."""
        ...


SEARCH_SPEC = ToolSpec(
    "search",
    "Search for evidence. Use a concise query.",
    {
        "type": "object",
        "properties": {"query": {"type": "string", "description": "The search query."}},
        "required": ["query"],
    },
)

CALCULATOR_SPEC = ToolSpec(
    "calculator",
    "Compute an arithmetic expression with + - * / // % ** and parentheses.",
    {
        "type": "object",
        "properties": {
            "expression": {"type": "string", "description": "For example (2014 - 1957) * 12."},
        },
        "required": ["expression"],
    },
)


class SearchTool:
    """Searches with one back-end."""

    spec = SEARCH_SPEC

    def __init__(self, service: SearchService) -> None:
        self.service = service

    def __repr__(self) -> str:
        return f"<SearchTool {self.service!r}>"

    async def run(self, arguments: Mapping[str, Scalar]) -> ToolResult:
        """Return the passages that were found, best first."""
        result = await self.service.search(str(arguments["query"]).strip())
        blocks = show(result.passages) if result.ok else (plain_block(f"Search failed: {result.error}"),)
        return ToolResult(
            blocks,
            ok=result.ok,
            status=result.status,
            error=result.error,
            latency=result.latency,
            backend=self.service.backend.name,
            cached=result.cached,
            document_ids=tuple(passage.id for passage in result.passages if passage.id),
            fatal=result.fatal,
        )

    async def aclose(self) -> None:
        """Release the back-end's connections."""
        await self.service.backend.aclose()


class Calculator:
    """Computes arithmetic, in process."""

    spec = CALCULATOR_SPEC

    def __repr__(self) -> str:
        return "<Calculator>"

    async def run(self, arguments: Mapping[str, Scalar]) -> ToolResult:
        """Return the value of an expression, or what is wrong with it."""
        value, problem = calculate(str(arguments["expression"]))
        status = "bad_input" if problem else "success"
        text = f"Error: {problem}" if problem else value
        return ToolResult((plain_block(text),), status=status, error=problem, backend="calculator")

    async def aclose(self) -> None:
        """Nothing is held."""


TOOL_NAMES = ("search", "calculator")


def build_tools(
    settings: ToolSettings, run_dir: Path, cache: Cache | None, notify: Notify | None = None
) -> dict[str, Tool]:
    """Return the declared tools by name, in the order of their declaration.

    A corpus called "world" is run_dir/world/corpus.jsonl. Raises ConfigError on an unknown tool and DataError
    on a corpus that cannot be read.
    """
    tools: dict[str, Tool] = {}
    for name in settings.declared:
        match name:
            case "search":
                backend = build_backend(settings.search, run_dir, notify or _quiet)
                bought = settings.search.backend not in {"local", "none"}
                kept = cache if settings.search.cache and bought else None
                tools[name] = SearchTool(SearchService(backend, settings.search.top_k, kept))
            case "calculator":
                tools[name] = Calculator()
            case _:
                raise ConfigError(f"no tool {name!r}, expected {' or '.join(TOOL_NAMES)}")
    return tools


def _quiet(notice: str) -> None:
    del notice
