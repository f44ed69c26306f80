"""How presets, files and single assignments become one configuration."""

import msgspec
import pytest

from core.config import Config
from core.errors import ConfigError
from core.settings import (
    PRESETS,
    build_config,
    differences,
    parse_assignment,
    setting_names,
    with_given,
    with_own,
)


def test_layers_override_each_other() -> None:
    """Assignments beat the file, the file beats the preset, the preset beats the defaults."""
    file = {"rollout": {"group_size": 3, "max_turns": 2}}
    config = build_config("search-r1", file, ["rollout.max_turns=7"])
    assert config.engine.lora_rank == 32
    assert config.rollout.group_size == 3
    assert config.rollout.max_turns == 7
    assert config.rollout.max_search_calls == Config().rollout.max_search_calls
    assert config.run.preset == "search-r1"


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_is_a_valid_configuration(preset: str) -> None:
    """Presets fit the Structs and the ranges."""
    assert build_config(preset, {}, []).run.preset == preset


def test_the_hosted_service_has_a_default_model() -> None:
    """One setting goes to the hosted service with the recipe's model; a named model stays."""
    hosted = build_config("search-r1", {}, ["engine.kind=pytrio"])
    assert (hosted.engine.base_model, hosted.engine.lora_rank) == ("Qwen/Qwen3.5-4B", 32)
    named = build_config("search-r1", {}, ["engine.kind=pytrio", "engine.base_model=other"])
    assert named.engine.base_model == "other"
    assert build_config("search-r1", {}, []).engine.base_model == ""


def test_no_preset_is_the_defaults() -> None:
    """Nothing given, nothing changed."""
    assert build_config("", {}, []) == Config()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("run.seed=3", ("run.seed", 3)),
        (" run.seed = 3 ", ("run.seed", 3)),
        ("learner.learning_rate=1e-4", ("learner.learning_rate", 1e-4)),
        ('data.train="a b"', ("data.train", "a b")),
        ("data.train=a/b.jsonl", ("data.train", "a/b.jsonl")),
        ("data.train=", ("data.train", "")),
        ("data.train=a=b", ("data.train", "a=b")),
        ("learner.dynamic_sampling=true", ("learner.dynamic_sampling", True)),
    ],
)
def test_assignments_are_toml_or_text(text: str, expected: tuple[str, object]) -> None:
    """A value that is no TOML is taken as it stands."""
    assert parse_assignment(text) == expected


@pytest.mark.parametrize(
    ("assignments", "message"),
    [
        (["learner.lerning_rate=1"], "unknown setting 'learner.lerning_rate', did you mean"),
        (["colour=red"], "unknown setting 'colour'"),
        (["run.seed"], "expected key=value"),
        (["=3"], "expected key=value"),
        (["run.seed=much"], "setting 'run.seed': 'much' does not fit"),
        (["learner.loss=pppo"], "did you mean 'ppo'?; choices: importance_sampling, ppo"),
        (["run.seed=1", "run.seed.low=2"], "'seed' is a value, not a table"),
        (["run.seed.low=2"], "'run.seed': {'low': 2} does not fit (Expected `int`, got `object`)"),
        (["rollout.group_size=0"], "'rollout.group_size': 0 is too small, expected at least 1"),
        (["learner.learning_rate=nan"], "nan, expected a finite number"),
        (["engine.lora_rank=3"], "'engine.lora_rank': 3, expected 4 to 64"),
        (["rollout.top_p=0.0"], "'rollout.top_p': 0.0, expected more than 0"),
    ],
)
def test_bad_assignments_are_said_in_one_line(assignments: list[str], message: str) -> None:
    """The key, the value and what was expected."""
    with pytest.raises(ConfigError) as caught:
        build_config("", {}, assignments)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_bad_files_and_presets_are_named() -> None:
    """The place of a wrong key is said, and the nearest preset."""
    with pytest.raises(ConfigError, match=r"the configuration file: unknown setting 'rollout\.grup_size'"):
        build_config("", {"rollout": {"grup_size": 3}}, [])
    with pytest.raises(ConfigError, match=r"the configuration file: unknown setting 'colour\.red'"):
        build_config("", {"colour": {"red": 3}}, [])
    with pytest.raises(ConfigError, match="unknown preset 'serch-r1', did you mean 'search-r1'"):
        build_config("serch-r1", {}, [])


def test_a_preset_may_be_named_in_a_file() -> None:
    """`run.preset` means what --preset does; two that differ are an error, an unknown one as well."""
    named = build_config("", {"run": {"preset": "demo"}}, ["rollout.max_turns=3"])
    assert named == build_config("demo", {}, ["rollout.max_turns=3"])
    assert build_config("demo", {}, ["run.preset=demo"]) == build_config("demo", {}, [])
    with pytest.raises(ConfigError, match=r"two presets are named, 'demo' and, as run\.preset, 'search-r1'"):
        build_config("demo", {"run": {"preset": "search-r1"}}, [])
    with pytest.raises(ConfigError, match="unknown preset 'dem'"):
        build_config("", {"run": {"preset": "dem"}}, [])


@pytest.mark.parametrize(
    ("assignment", "expected"),
    [
        ("tools.search.timeout=inf", "finite"),
        ("tools.search.timeout=0.0", "more than 0"),
        ("run.seed=-1", "at least 0"),
        ("run.seed=2147483648", "at most 2147483647"),
        ("learner.adam.beta2=1.0", "less than 1"),
        ("budget.money=-1", "at least 0"),
        ("rollout.top_k=-2", "at least -1"),
    ],
)
def test_numbers_that_cannot_be_meant_are_refused(assignment: str, expected: str) -> None:
    """Before a run is made: later, somebody would have paid for it."""
    with pytest.raises(ConfigError, match=assignment.partition("=")[0]) as caught:
        build_config("", {}, [assignment])
    assert expected in str(caught.value)


def test_numbers_become_what_the_field_is() -> None:
    """An int is good enough for a float field, and a number for a text field."""
    config = build_config(
        "", {}, ["learner.kl_beta=1", "engine.base_model=7", "learner.loss_config.clip=0.2"]
    )
    assert (config.learner.kl_beta, config.engine.base_model) == (1.0, "7")
    assert config.learner.loss_config == {"clip": 0.2}


def test_setting_names_are_the_dotted_leaves() -> None:
    """Every name can be assigned to, and stands for one value."""
    names = list(setting_names())
    assert len(names) == len(set(names))
    assert {"run.seed", "rollout.tree.m", "tools.search.top_k", "learner.packing.max_datums"} <= set(names)
    assert not {"rollout.tree", "learner"} & set(names)


def test_only_given_settings_conflict() -> None:
    """A later command that repeats what is frozen, or says nothing, is no conflict."""
    frozen = build_config("search-r1", {}, ["run.seed=3"])

    def conflicts(preset: str, tables: dict[str, object], assignments: list[str]) -> list[str]:
        return differences(frozen, with_given(frozen, preset, tables, assignments))

    assert conflicts("", {}, []) == []
    assert conflicts("search-r1", {"run": {"seed": 3}}, ["rollout.group_size=8"]) == []
    assert conflicts("", {}, ["run.seed=4"]) == ["run.seed: the run has 3, you asked for 4"]
    with pytest.raises(ConfigError, match="preset: the run has 'search-r1', you asked for 'demo'"):
        conflicts("demo", {}, [])
    with pytest.raises(ConfigError, match="unknown setting"):
        conflicts("", {}, ["run.sed=4"])


def test_budget_and_tracking_are_the_commands_own() -> None:
    """A larger budget lets a stopped run go on, so neither table is a conflict, and both take effect."""
    frozen = build_config("demo", {}, ["budget.search_calls=10"])
    wanted = with_given(frozen, "", {}, ["budget.search_calls=20", "tracking.swanlab=offline"])
    assert differences(frozen, wanted) == []
    changed = with_own(frozen, wanted)
    assert (changed.budget.search_calls, changed.tracking.swanlab) == (20, "offline")
    assert changed.rollout == frozen.rollout


def test_differences_name_both_values() -> None:
    """One line per setting, in the order of their names."""
    wanted = msgspec.structs.replace(Config(), run=msgspec.structs.replace(Config().run, seed=9))
    assert differences(Config(), wanted) == ["run.seed: the run has 0, you asked for 9"]
    assert differences(Config(), Config()) == []
