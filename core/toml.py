"""Owns how a configuration is written as TOML, so that it can be read, changed and given back."""

import json
from collections.abc import Iterator, Mapping

import msgspec

from core.config import Config, Table


def config_lines(config: Config) -> list[str]:
    """Return every setting with its value, a table after the other; `--config` takes the same lines.

    What a run fills in by itself (the frozen prompt's texts) is left out while it is empty.
    """
    lines = list(_table_lines(config, ""))
    return lines[1:] if lines and not lines[0] else lines


def _table_lines(table: Table, name: str) -> Iterator[str]:
    values = {field: getattr(table, field) for field in table.__struct_fields__}
    below = {field: value for field, value in values.items() if isinstance(value, Table)}
    own = {field: value for field, value in values.items() if field not in below and value is not None}
    if own:
        yield from ("", f"[{name}]")
    for field, value in own.items():
        yield f"{field} = {_value(msgspec.to_builtins(value))}"
    for field, value in below.items():
        yield from _table_lines(value, f"{name}.{field}" if name else field)


def _value(value: object) -> str:
    match value:
        case bool():
            return "true" if value else "false"
        case str():
            return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
        case int() | float():
            return repr(value)
        case Mapping():
            return "{" + ", ".join(f"{_value(str(key))} = {_value(one)}" for key, one in value.items()) + "}"
        case list() | tuple():
            return "[" + ", ".join(map(_value, value)) + "]"
        case _:
            raise TypeError(f"no setting has a value like {value!r}")
