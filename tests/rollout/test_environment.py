"""What a run keeps of its settings, and that each of them reaches what it is about."""

from pathlib import Path

import anyio
import msgspec
import pytest

from core.config import Config, RewardSettings, from_plain
from core.errors import ConfigError
from core.events import Plan, SamplingParams
from rollout.environment import build_environment, freeze
from rollout.live import LiveGroup
from rollout.plan import make_params, make_plan
from rollout.prompts import SEARCH_R1
from rollout.reward import get_scorer
from tests.fakes import ScriptedSampler, ScriptedSearch, answer, make_config, make_environment
from tests.rollout.support import Recorder
from tests.rollout.test_chat import Engine
from tests.rollout.test_trees_adoption import grow, question

NO_SEARCH = {"search": {"backend": "none"}}


def prompted(tmp_path: Path, config: Config) -> str:
    """Return the first prompt of a run with a frozen configuration, as text."""
    talk = build_environment(config, Engine("qwen3.5"), tmp_path).chat
    return talk.encoder.decode(talk.first_prompt("Who?"))


def test_a_prompt_file_is_frozen_into_the_run(tmp_path: Path) -> None:
    """What the file says later, and whether it is there at all, changes nothing for the run."""
    path = tmp_path / "prompt.toml"
    path.write_text('system = "Be brief."\nuser = "Q: {question} A:"\n')
    config = freeze(from_plain({"rollout": {"prompt": str(path)}, "tools": NO_SEARCH}))
    assert (config.rollout.system_prompt, config.rollout.user_template) == ("Be brief.", "Q: {question} A:")
    path.unlink()
    text = prompted(tmp_path, msgspec.convert(msgspec.to_builtins(config), Config))
    assert "Be brief." in text
    assert "Q: Who? A:" in text


def test_given_texts_come_before_the_named_template(tmp_path: Path) -> None:
    """The settings of a run, edited and given to another, are what that one is told; no file is needed."""
    given = {"prompt": "no-such-file", "system_prompt": "Mine.", "user_template": "Say: {question}"}
    config = freeze(from_plain({"rollout": given, "tools": NO_SEARCH}))
    assert (config.rollout.system_prompt, config.rollout.user_template) == ("Mine.", "Say: {question}")
    assert freeze(config) == config
    text = prompted(tmp_path, config)
    assert "Mine." in text
    assert "Say: Who?" in text
    half = freeze(from_plain({"rollout": {"user_template": "Say: {question}"}, "tools": NO_SEARCH})).rollout
    assert (half.system_prompt, half.user_template) == (SEARCH_R1.system, "Say: {question}")
    with pytest.raises(ConfigError, match="expected exactly once"):
        freeze(from_plain({"rollout": {"user_template": "no place"}, "tools": NO_SEARCH}))


@pytest.mark.parametrize("thinking", [False, True])
def test_thinking_reaches_the_chat(tmp_path: Path, thinking: bool) -> None:
    """With rollout.enable_thinking the generation prompt ends inside an open thinking block."""
    config = freeze(from_plain({"rollout": {"enable_thinking": thinking}, "tools": NO_SEARCH}))
    assert build_environment(config, Engine("qwen3.5"), tmp_path).chat.opened == thinking


def test_declared_tools_and_scorer_reach_the_environment(tmp_path: Path) -> None:
    """Tools in their order, the scorer with the levels that are set."""
    config = freeze(
        from_plain(
            {
                "tools": {"declared": ["calculator", "search"], **NO_SEARCH},
                "reward": {"scorer": "search_r1_format", "final_format_score": 0.3},
            }
        )
    )
    built = build_environment(config, Engine("qwen3.5"), tmp_path)
    assert list(built.tools) == [tool.name for tool in built.chat.tools] == ["calculator", "search"]
    wanted = get_scorer("search_r1_format", RewardSettings(final_format_score=0.3))
    assert (built.scorer.id, built.scorer.version) == (wanted.id, wanted.version)


def test_every_limit_reaches_the_group() -> None:
    """Each sampling parameter is that of its setting; a plan has the shape that is set, min_group within it."""
    values = {
        "temperature": 0.7,
        "top_p": 0.8,
        "top_k": 40,
        "max_search_calls": 2,
        "max_turns": 7,
        "max_trajectory_tokens": 900,
        "max_assistant_tokens": 80,
        "max_tool_tokens": 90,
        "final_turn": "forced",
    }
    assert set(values) == set(SamplingParams.__struct_fields__)
    params = make_params(from_plain({"rollout": values}).rollout)
    assert {name: getattr(params, name) for name in values} == values
    tree = {"m": 3, "n": 4, "l": 5, "k": 6, "expand": "value", "temperature": 0.5}
    plan = make_plan(from_plain({"rollout": {"mode": "tree", "tree": tree, "min_group": 99}}).rollout)
    assert plan == Plan(mode="tree", m=3, n=4, l=5, k=6, expand="value", tau=0.5, min_group=18)
    chains = make_plan(from_plain({"rollout": {"group_size": 5, "min_group": 3}}).rollout)
    assert chains == Plan(mode="chain", group_size=5, min_group=3)


def test_every_limit_reaches_the_sampler() -> None:
    """Temperature, nucleus, stop strings, and a turn's limit or what the trajectory has left."""
    limits = {"temperature": 0.7, "top_p": 0.8, "top_k": 40, "max_assistant_tokens": 33, "group_size": 2}
    sampler = ScriptedSampler(lambda prompt, seed, index: answer("Ada"))
    config, environment = make_config(**limits), make_environment(sampler, ScriptedSearch())

    async def main() -> None:
        live = await LiveGroup.open(question(config, environment, 0), Recorder().write)
        await grow(config, environment, live)

    anyio.run(main)
    (asked,) = sampler.requests
    assert (asked.temperature, asked.top_p, asked.top_k, asked.max_tokens) == (0.7, 0.8, 40, 33)
    assert (asked.num_samples, asked.stop) == (2, environment.chat.stop)
