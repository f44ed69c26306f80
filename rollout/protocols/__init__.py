"""Tool protocols: how a policy writes calls and answers. One file per protocol."""

from core.errors import ConfigError
from rollout.protocols.base import Parsed, ToolProtocol
from rollout.protocols.hermes import Hermes
from rollout.protocols.qwen3_5 import Qwen35
from rollout.protocols.search_r1 import SearchR1
from rollout.toolspec import ToolCall

__all__ = ["PROTOCOLS", "Parsed", "ToolCall", "ToolProtocol", "get_protocol"]

PROTOCOLS: dict[str, ToolProtocol] = {p.name: p for p in (Qwen35(), Hermes(), SearchR1())}


def get_protocol(name: str) -> ToolProtocol:
    """Return a protocol by name; raises ConfigError naming the known ones."""
    if name not in PROTOCOLS:
        raise ConfigError(f"no tool protocol {name!r}, expected one of {', '.join(sorted(PROTOCOLS))}")
    return PROTOCOLS[name]
