"""A configuration written as TOML is the same configuration when it is given back."""

import tomllib

import msgspec
import pytest

from core.config import Config
from core.settings import PRESETS, build_config, setting_names
from core.toml import config_lines


@pytest.mark.parametrize("preset", ["", *PRESETS])
def test_what_is_printed_can_be_given_back(preset: str) -> None:
    """Every preset, and every setting by its name."""
    config = build_config(preset, {}, [])
    tables = tomllib.loads("\n".join(config_lines(config)))
    assert build_config("", tables, []) == config
    told = {f"{table}.{name}" for table, names in tables.items() for name in names}
    assert {".".join(name.split(".")[:2]) for name in setting_names()} - told == {
        "rollout.system_prompt",
        "rollout.user_template",
    }


def test_texts_keep_every_character() -> None:
    """A frozen prompt has lines, quotes and letters of any script."""
    text = 'one\n"two" \\ \t \x7f \u2028 三 😀'
    rollout = msgspec.structs.replace(Config().rollout, system_prompt=text, user_template="{question}")
    config = msgspec.structs.replace(Config(), rollout=rollout)
    assert build_config("", tomllib.loads("\n".join(config_lines(config))), []) == config
