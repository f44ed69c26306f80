"""Owns how code that a user or a log names (`module:function`) is loaded: only if it was allowed by name."""

import importlib
import sys
from collections.abc import Callable, Collection
from pathlib import Path

from core.errors import CodeNotAllowed, ConfigError


def load_function(spec: str, allow_code: Collection[str]) -> Callable[..., object]:
    """Return the function that `spec` names, from the path or, as for a script, the current directory.

    Raises CodeNotAllowed unless `spec` stands in `allow_code`, ConfigError when it cannot be found.
    """
    if spec not in allow_code:
        raise CodeNotAllowed(f"{spec!r} is user code and runs only when allowed by name: --allow-code {spec}")
    module_name, colon, name = spec.partition(":")
    if not (module_name and colon and name):
        raise ConfigError(f"{spec!r} is no user code, expected module:function")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)
    try:
        function = getattr(importlib.import_module(module_name), name, None)
    except Exception as error:  # user code may raise anything while it is imported
        raise ConfigError(
            f"user code {spec!r}: cannot import {module_name!r}: {type(error).__name__}: {error}"
        ) from error
    if not callable(function):
        raise ConfigError(f"user code {spec!r}: module {module_name!r} has no function {name!r}")
    loaded: Callable[..., object] = function
    return loaded
