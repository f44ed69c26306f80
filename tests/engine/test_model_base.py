"""The shipped base model: what it is, that it can be rebuilt, and that it learns by reading."""

import argparse
import shutil
from pathlib import Path

import numpy as np
import pytest

from benchmarks.engine_learning import Room, evaluate, rewards, rollout, train
from engine.embedded.base_model import BASE_FOLDER, save_weights
from engine.embedded.compute import BaseModel, SamplerModel
from engine.embedded.model import ModelConfig
from engine.embedded.pretrain import pretrain
from engine.embedded.prompts import PROMPTS, SEARCH_TOOL
from engine.embedded.scripts import NO_RESULTS, render_results
from engine.embedded.world import split_questions
from rollout.observations import text_of
from rollout.prompts import PROMPTS as ROLLOUT_PROMPTS
from rollout.search.base import Passage
from rollout.search.render import NO_RESULTS as ROLLOUT_NO_RESULTS
from rollout.search.render import show
from rollout.tools import SEARCH_SPEC

BASE = BaseModel.load()
QUESTIONS = [q for hops in (1, 2) for q in split_questions(0)["dev", hops]]


def test_the_shipped_model_is_small() -> None:
    """At most 2 MB of files, 120 to 260 thousand parameters, a context of 2,048."""
    assert sum(path.stat().st_size for path in BASE_FOLDER.iterdir()) < 2_000_000
    assert 120_000 < sum(x.size for x in BASE.weights.values()) < 260_000
    assert BASE.context >= 2048


def test_pretraining_twice_gives_the_same_digest(tmp_path: Path) -> None:
    """Two runs write the same bytes, another seed other weights; progress counts up to the last step."""
    seen: list[tuple[int, int]] = []
    first = pretrain(tmp_path / "a", steps=3, progress=lambda step, steps, _: seen.append((step, steps)))
    second = pretrain(tmp_path / "b", steps=3)
    assert first == second
    assert seen == [(1, 3), (2, 3), (3, 3)]
    for path in (tmp_path / "a").iterdir():
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes()
    assert pretrain(tmp_path / "c", seed=1, steps=3) != first


def test_the_fingerprint_covers_weights_and_tokenizer(tmp_path: Path) -> None:
    """A changed weight or template is another model; a copy elsewhere is the same."""
    copy = tmp_path / "copy"
    shutil.copytree(BASE_FOLDER, copy)
    assert BaseModel.load(copy).fingerprint == BASE.fingerprint
    template = copy / "chat_template.jinja"
    template.chmod(0o644)
    template.write_text(template.read_text(encoding="utf-8") + " ", encoding="utf-8")
    assert BaseModel.load(copy).fingerprint != BASE.fingerprint
    other = tmp_path / "other"
    shutil.copytree(BASE_FOLDER, other)
    save_weights(other, BASE.config, BASE.weights | {"norm": BASE.weights["norm"] * 2})
    assert BaseModel.load(other).fingerprint != BASE.fingerprint


def test_a_tokenizer_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    """Weights for another vocabulary are named at loading."""
    copy = tmp_path / "copy"
    shutil.copytree(BASE_FOLDER, copy)
    config = ModelConfig(vocab_size=7)
    save_weights(copy, config, BASE.weights)
    with pytest.raises(ValueError, match="a model of 7: rebuild it"):
        BaseModel.load(copy)


def test_pretraining_shows_what_rollouts_show() -> None:
    """Prompts, tool declaration and results are those of the rollout room, word for word."""
    for name, prompt in PROMPTS.items():
        assert (ROLLOUT_PROMPTS[name].system, ROLLOUT_PROMPTS[name].user) == (prompt.system, prompt.user)
    assert SEARCH_SPEC.declaration() == SEARCH_TOOL
    assert NO_RESULTS == ROLLOUT_NO_RESULTS
    texts = ["The capital of Zorvia is Melk.", "Two.", "Three."]
    blocks = show([Passage(content=text) for text in texts])
    assert "".join(text_of(block) for block in blocks) == render_results(texts)


def test_the_base_can_do_the_task_a_little() -> None:
    """Sampled exact match 15 to 50 %, format at least 70 %, and at most 10 % when nothing is found."""
    sampler = SamplerModel.from_base(BASE)
    seeing = evaluate(sampler, Room(BASE_FOLDER, 0), QUESTIONS, 4)
    blind = evaluate(sampler, Room(BASE_FOLDER, 0, blind=True), QUESTIONS, 2)
    assert 0.15 <= seeing["em"] <= 0.50
    assert seeing["format"] >= 0.70
    assert blind["em"] <= 0.10


def test_a_few_steps_of_rl_raise_held_out_exact_match() -> None:
    """Twelve steps gain at least 15 points, keeps reading, and two runs end in the same weights."""
    room = Room(BASE_FOLDER, 0)
    args = argparse.Namespace(
        world=0, rank=16, steps=12, groups=8, group_size=8, lr=2e-3, loss="importance_sampling"
    )
    before = evaluate(SamplerModel.from_base(BASE), room, QUESTIONS, 2)
    model, _ = train(BASE, room, args, seed=5)
    sampler = SamplerModel(BASE, model.merged())
    after = evaluate(sampler, room, QUESTIONS, 2)
    assert after["em"] >= before["em"] + 0.15
    blind = rewards(rollout(sampler, Room(BASE_FOLDER, 0, blind=True), QUESTIONS, 1, 0, 1.0))
    assert np.mean(blind == 1) <= 0.10
    args.steps, args.groups = 2, 2
    assert train(BASE, room, args, seed=6)[0].digest() == train(BASE, room, args, seed=6)[0].digest()
