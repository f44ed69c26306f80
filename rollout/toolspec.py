"""Owns how a tool is declared and how a call's arguments are checked against its JSON schema."""

import math
from collections.abc import Mapping
from functools import lru_cache

import msgspec
from jsonschema import Draft202012Validator

Scalar = str | int | float | bool | None
"""What an argument is in the log; lists and objects stand as their JSON text."""

JsonValue = Scalar | list["JsonValue"] | dict[str, "JsonValue"]

SMALLEST_INT = -(2**63)
LARGEST_INT = 2**64 - 1
"""What MessagePack can hold."""


class ToolSpec(msgspec.Struct, frozen=True):
    """A declared tool: what the policy is told of it."""

    name: str
    description: str
    schema: dict[str, JsonValue]
    """JSON schema of the arguments, an object."""

    def declaration(self) -> dict[str, JsonValue]:
        """Return the tool as a chat template takes it."""
        function: dict[str, JsonValue] = {
            "name": self.name,
            "description": self.description,
            "parameters": self.schema,
        }
        return {"type": "function", "function": function}

    def properties(self) -> dict[str, JsonValue]:
        """Return the declared arguments by name."""
        found = self.schema.get("properties")
        return found if isinstance(found, dict) else {}

    def argument_type(self, name: str) -> str:
        """Return the declared JSON type of one argument, "string" where none is declared."""
        declared = self.properties().get(name)
        kind = declared.get("type", "string") if isinstance(declared, dict) else "string"
        return kind if isinstance(kind, str) else "string"


class ToolCall(msgspec.Struct, frozen=True):
    """A call that the policy wrote."""

    name: str
    arguments: dict[str, Scalar]


class Checked(msgspec.Struct, frozen=True):
    """Arguments as they are logged, or what is wrong with them."""

    arguments: dict[str, Scalar]
    problem: str = ""


@lru_cache(maxsize=64)
def _validator(schema: bytes) -> Draft202012Validator:
    return Draft202012Validator(msgspec.json.decode(schema))


def find_spec(name: str, specs: tuple[ToolSpec, ...]) -> ToolSpec | None:
    """Return the declared tool called `name`."""
    return next((spec for spec in specs if spec.name == name), None)


def check_arguments(spec: ToolSpec, arguments: Mapping[str, JsonValue]) -> Checked:
    """Check decoded arguments against the tool's schema; undeclared names are refused.

    A required string must say something: blank text is refused as well.
    """
    extra = [name for name in arguments if name not in spec.properties()]
    if extra and not spec.schema.get("additionalProperties"):
        return Checked({}, f"tool {spec.name!r} has no argument {extra[0]!r}")
    required = spec.schema.get("required")
    for name in required if isinstance(required, list) else []:
        value = arguments.get(str(name))
        if isinstance(value, str) and not value.strip():
            return Checked({}, f"argument {name!r} of tool {spec.name!r} is blank")
    try:
        error = next(iter(_validator(_canonical(spec.schema)).iter_errors(dict(arguments))), None)
        if error is not None:
            return Checked({}, f"arguments of tool {spec.name!r}: {error.message[:200]}")
        return _flatten(spec, arguments)
    except RecursionError:
        return Checked({}, f"arguments of tool {spec.name!r} are nested too deeply")


def _flatten(spec: ToolSpec, arguments: Mapping[str, JsonValue]) -> Checked:
    flat: dict[str, Scalar] = {}
    for name, value in arguments.items():
        problem = _unloggable(name) or _unloggable(value)
        if problem:
            return Checked({}, f"argument {name!r} of tool {spec.name!r} {problem}")
        flat[name] = _canonical(value).decode() if isinstance(value, list | dict) else value
    return Checked(flat)


def _canonical(value: JsonValue) -> bytes:
    return msgspec.json.encode(value, order="sorted")


def _unloggable(value: JsonValue) -> str:
    """Tell what keeps a value out of the log, "" if nothing."""
    match value:
        case str():
            return "holds half a surrogate pair" if any("\ud800" <= c <= "\udfff" for c in value) else ""
        case bool() | None:
            return ""
        case int():
            return "" if SMALLEST_INT <= value <= LARGEST_INT else "is an integer beyond 64 bits"
        case float():
            return "" if math.isfinite(value) else "is not a finite number"
        case list():
            return next((problem for item in value if (problem := _unloggable(item))), "")
        case dict():
            both = (item for pair in value.items() for item in pair)
            return next((problem for item in both if (problem := _unloggable(item))), "")
