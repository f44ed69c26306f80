"""Owns how a configuration comes about: preset, then file, then `--set`, each checked against the Structs.

Pure: files are read and parsed by the caller. Errors name the key, the value and the nearest valid name.
"""

import difflib
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from typing import get_args, get_origin

import msgspec

from core.config import Config, Table
from core.errors import ConfigError
from core.ranges import check_ranges

Plain = dict[str, object]


def build_config(preset: str, file_tables: Mapping[str, object], assignments: Sequence[str]) -> Config:
    """Return the configuration of `preset`, overridden by the file's tables, then by `key=value` texts.

    A preset may also be named as `run.preset`. Raises ConfigError with the offending key or value and the
    nearest valid name.
    """
    given: Plain = {}
    _merge(given, file_tables, where="the configuration file")
    for text in assignments:
        key, value = parse_assignment(text)
        _assign(given, key, value)
    preset = _named_preset(preset, given)
    plain: Plain = {}
    _merge(plain, preset_tables(preset), where=f"preset {preset!r}")
    for key, value in _flatten(given):
        _assign(plain, key, value)
    if preset:
        _assign(plain, "run.preset", preset)
    try:
        config = msgspec.convert(plain, Config)
    except msgspec.ValidationError as error:
        raise ConfigError(f"configuration: {error}") from error
    check_ranges(dict(_flatten(msgspec.to_builtins(config))))
    return _with_hosted_model(config)


def _named_preset(preset: str, given: Plain) -> str:
    """Return the one preset that is named, by the option or as `run.preset`; raises ConfigError on two."""
    run = given.get("run")
    named = run.get("preset", "") if isinstance(run, dict) else ""
    if preset and named and named != preset:
        raise ConfigError(f"two presets are named, {preset!r} and, as run.preset, {named!r}")
    return preset or str(named)


def _with_hosted_model(config: Config) -> Config:
    """Return the configuration with the recipe's base model if the hosted service has none named."""
    if config.engine.kind != "pytrio" or config.engine.base_model:
        return config
    engine = msgspec.structs.replace(config.engine, base_model=HOSTED_MODEL)
    return msgspec.structs.replace(config, engine=engine)


def preset_tables(name: str) -> Mapping[str, object]:
    """Return the tables of a preset; raises ConfigError naming the nearest one when there is none."""
    if not name:
        return {}
    if name not in PRESETS:
        raise ConfigError(
            f"unknown preset {name!r}{_nearest(name, PRESETS)}; presets: {', '.join(sorted(PRESETS))}"
        )
    return PRESETS[name]


def parse_assignment(text: str) -> tuple[str, object]:
    """Return (dotted key, value) of `key=value`; the value is TOML if it parses, else the text itself."""
    key, equals, raw = text.partition("=")
    key = key.strip()
    if not equals or not key:
        raise ConfigError(f"--set {text!r}: expected key=value, such as learner.learning_rate=1e-4")
    try:
        return key, tomllib.loads(f"v = {raw.strip()}")["v"]
    except tomllib.TOMLDecodeError:
        return key, raw.strip()


def setting_names(table: type[Table] = Config, prefix: str = "") -> Iterator[str]:
    """Yield every dotted setting name."""
    for field in msgspec.structs.fields(table):
        if isinstance(field.type, type) and issubclass(field.type, Table):
            yield from setting_names(field.type, f"{prefix}{field.encode_name}.")
        else:
            yield prefix + field.encode_name


OWN = ("budget.", "tracking.")


def with_own(frozen: Config, wanted: Config) -> Config:
    """Return the frozen configuration with a command's own settings: when it stops, and who is told."""
    return msgspec.structs.replace(frozen, budget=wanted.budget, tracking=wanted.tracking)


def differences(frozen: Config, wanted: Config) -> list[str]:
    """Return one line per frozen setting that differs, with both values."""
    left, right = (dict(_flatten(msgspec.to_builtins(config))) for config in (frozen, wanted))
    keys = sorted(key for key in left.keys() | right.keys() if left.get(key) != right.get(key))
    told = (key for key in keys if not key.startswith(OWN))
    return [f"{key}: the run has {left.get(key)!r}, you asked for {right.get(key)!r}" for key in told]


def with_given(
    frozen: Config, preset: str, file_tables: Mapping[str, object], assignments: Sequence[str]
) -> Config:
    """Return the frozen configuration with what is given now put over it, so that the two can be compared.

    What is not given is not compared: later commands only need `--run`. Raises ConfigError on a bad setting,
    and when another preset is named.
    """
    build_config(preset, file_tables, assignments)  # the given settings must be valid in themselves
    if preset and frozen.run.preset != preset:
        raise ConfigError(f"preset: the run has {frozen.run.preset!r}, you asked for {preset!r}")
    merged: Plain = msgspec.to_builtins(frozen)
    _merge(merged, file_tables, where="the configuration file")
    for text in assignments:
        _assign(merged, *parse_assignment(text))
    return msgspec.convert(merged, Config)


def _merge(target: Plain, source: Mapping[str, object], *, where: str) -> None:
    for key, value in _flatten(source):
        try:
            _assign(target, key, value)
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from error


def _assign(target: Plain, key: str, value: object) -> None:
    """Set a dotted key after checking that the Structs have it."""
    table: object = Config
    parts = key.split(".")
    for depth, part in enumerate(parts):
        if not (isinstance(table, type) and issubclass(table, Table)):
            break
        fields = {field.encode_name: field.type for field in msgspec.structs.fields(table)}
        if part not in fields:
            raise ConfigError(f"unknown setting {key!r}{_nearest(key, setting_names())}")
        table = fields[part]
        if depth == len(parts) - 1:
            value = _fit(key, value, table)
    for part in parts[:-1]:
        below = target.setdefault(part, {})
        if not isinstance(below, dict):
            raise ConfigError(f"setting {key!r}: {part!r} is a value, not a table")
        target = below
    target[parts[-1]] = value


def _fit(key: str, value: object, annotation: object) -> object:
    """Return `value` as the field's type; a number given for a text becomes that text."""
    if annotation is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if annotation is str and isinstance(value, (int, float)) and not isinstance(value, bool):
        value = str(value)
    try:
        return msgspec.to_builtins(msgspec.convert(value, annotation))
    except msgspec.ValidationError as error:
        choices = get_args(annotation)
        hint = ""
        if choices and all(isinstance(choice, str) for choice in choices):
            hint = f"{_nearest(str(value), choices)}; choices: {', '.join(choices)}"
        raise ConfigError(f"setting {key!r}: {value!r} does not fit ({error}){hint}") from error


def _flatten(
    tables: Mapping[str, object], prefix: str = "", table: object = Config
) -> Iterator[tuple[str, object]]:
    for key, value in tables.items():
        below: object = None
        if isinstance(table, type) and issubclass(table, Table):
            below = next((f.type for f in msgspec.structs.fields(table) if f.encode_name == key), None)
        is_table = isinstance(below, type) and issubclass(below, Table)
        if isinstance(value, Mapping) and (is_table or below is None) and get_origin(below) is not dict:
            yield from _flatten(value, f"{prefix}{key}.", below)
        else:
            yield prefix + key, value


def _nearest(name: str, names: Iterator[str] | Sequence[str] | Mapping[str, object]) -> str:
    close = difflib.get_close_matches(name, list(names), n=1, cutoff=0.5)
    return f", did you mean {close[0]!r}?" if close else ""


_TREE_COMMON: Plain = {
    "rollout.protocol": "search_r1",
    "rollout.prompt": "tree-grpo",
    "rollout.final_turn": "forced",
    "rollout.temperature": 1.0,
    "reward.scorer": "search_r1_format",
    "learner.loss": "ppo",
    "learner.loss_config": {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
    "learner.kl_beta": 0.001,
    # The papers train all weights at 1e-6; LoRA needs about a hundred times more, so this one is ours.
    "learner.learning_rate": 1e-4,
}

_TREE_SHAPE: Plain = {
    "rollout.mode": "tree",
    "rollout.tree.m": 2,
    "rollout.tree.n": 2,
    "rollout.tree.l": 1,
    "rollout.tree.k": 3,
    "learner.estimator": "tree",
}

_CHAIN_SHAPE: Plain = {"rollout.mode": "chain", "rollout.group_size": 4, "learner.estimator": "grpo"}

_QA_LIMITS: Plain = {
    "rollout.max_turns": 4,
    "rollout.max_search_calls": 3,
    "rollout.max_assistant_tokens": 500,
    "rollout.max_tool_tokens": 500,
    "rollout.max_trajectory_tokens": 4096,
}

_WEB_LIMITS: Plain = {
    "rollout.max_turns": 6,
    "rollout.max_search_calls": 5,
    "rollout.max_assistant_tokens": 2000,
    "rollout.max_tool_tokens": 1000,
    "rollout.max_trajectory_tokens": 16_384,
    "learner.packing.max_datum_tokens": 16_384,
    "reward.scorer": "f1_format",
}

_SEARCH_R1: Plain = {
    "engine.lora_rank": 32,
    "rollout.prompt": "search-r1",
    "rollout.group_size": 8,
    "learner.groups_per_step": 8,
    "learner.learning_rate": 1e-4,
}

_DEMO: Plain = {
    "rollout.prompt": "demo",
    "rollout.max_turns": 5,
    "rollout.max_search_calls": 4,
    "rollout.max_trajectory_tokens": 2048,
    "rollout.max_assistant_tokens": 64,
    "rollout.max_tool_tokens": 256,
    "learner.learning_rate": 2e-3,
    "learner.save_every": 5,
}

_FLAT_PRESETS: Mapping[str, Plain] = {
    "demo": _DEMO,
    "demo-tree": _DEMO | _TREE_SHAPE,
    "search-r1": _SEARCH_R1,
    "tree-grpo-multihop": _TREE_COMMON | _TREE_SHAPE | _QA_LIMITS,
    "tree-grpo-singlehop": _TREE_COMMON | _TREE_SHAPE | _QA_LIMITS,
    "tree-grpo-webagent": _TREE_COMMON | _TREE_SHAPE | _WEB_LIMITS,
    "grpo-multihop": _TREE_COMMON | _CHAIN_SHAPE | _QA_LIMITS,
    "grpo-singlehop": _TREE_COMMON | _CHAIN_SHAPE | _QA_LIMITS,
    "grpo-webagent": _TREE_COMMON | _CHAIN_SHAPE | _WEB_LIMITS,
}


def _nested(flat: Plain) -> Plain:
    tables: Plain = {}
    for key, value in flat.items():
        _assign(tables, key, value)
    return tables


PRESETS: Mapping[str, Plain] = {name: _nested(flat) for name, flat in _FLAT_PRESETS.items()}
"""Preset name → tables. Every preset runs on the embedded engine unless `engine.kind` is set to pytrio."""

HOSTED_MODEL = "Qwen/Qwen3.5-4B"
"""The base model of the Search-R1 recipe, used when `engine.kind = "pytrio"` and none is named."""
