"""What the service receives from the SDK: losses, optimizer settings, names and lifetimes, as configured."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from core.config import AdamSettings
from core.events import CheckpointSaved, PolicyPublished, Recovered
from engine.client import Session
from learner.weights import DAY
from store.log import Log
from tests.learner.hosted import Place, place


def events(log: Log, kind: type) -> list[Any]:
    """Return the journal's events of one kind."""
    return [record.event for record in log.journal.read() if isinstance(record.event, kind)]


@pytest.mark.usefixtures("session")
@pytest.mark.parametrize(
    ("loss", "config", "received"),
    [
        ("importance_sampling", {}, "importance_sampling"),
        ("ppo", {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}, "ppo"),
        ("cispo", {"clip_low_threshold": 0.5, "clip_high_threshold": 2.0}, "cispo"),
        ("dro", {"beta": 0.05}, "dro"),
        ("gspo", {"clip_low_threshold": 0.5, "clip_high_threshold": 1.5}, "cross_entropy"),
    ],
)
def test_a_loss_arrives_under_its_name_with_its_config(
    tmp_path: Path, engine_dir: Path, loss: str, config: dict[str, float], received: str
) -> None:
    """Gspo is ours: one forward pass, then its gradient as cross-entropy weights, of the same datums."""
    with place(tmp_path, engine_dir, loss=loss, loss_config=config) as here:
        here.learner(2).finish()
        sent = here.gateway.payloads("trainer.forward_backward")
        asked = here.gateway.payloads("trainer.forward")
    assert sent
    ours = loss == "gspo"
    assert [payload["loss"] for payload in sent] == [
        {"type": received, "config": {} if ours else config} for _ in sent
    ]
    assert len(asked) == (len(sent) if ours else 0)
    for forward, backward in zip(asked, sent, strict=False):
        inputs = [[datum["model_input"] for datum in payload["data"]] for payload in (forward, backward)]
        assert inputs[0] == inputs[1]
        assert any(weight != 0 for datum in backward["data"] for weight in datum["weights"])


@pytest.mark.usefixtures("session")
def test_of_a_step_without_signal_the_trainer_hears_nothing(tmp_path: Path, engine_dir: Path) -> None:
    """No gradient, no optimizer step, no weights; only the states at the beginning and the end."""
    with place(tmp_path, engine_dir, reward=lambda uid, tree: 1.0) as here:
        here.learner(2).finish()
        kinds = [event["type"] for event in here.gateway.passed]
        assert set(kinds) == {"trainer.init_run", "trainer.save_state"}
        [lora] = [payload["lora_config"] for payload in here.gateway.payloads("trainer.init_run")]
        assert (lora["rank"], lora["seed"]) == (4, here.config.run.seed)


def rates(here: Place, since: int = 0) -> list[float]:
    """Return the learning rates that were received."""
    steps = here.gateway.payloads("trainer.optimize_step")[since:]
    return [step["adam_params"]["learning_rate"] for step in steps]


def test_optimizer_settings_arrive_and_recovery_sends_the_recorded_rates(
    tmp_path: Path, engine_dir: Path, session: Session
) -> None:
    """A goal moved from 4 to 5 changes the cosine of the step to come, not of those sent again."""
    adam = AdamSettings(beta1=0.8, beta2=0.9, eps=1e-8, weight_decay=0.01, grad_clip_norm=0.5)
    schedule = {"schedule": "cosine", "warmup_steps": 2, "learning_rate": 1e-2}
    with place(tmp_path, engine_dir, adam=adam, **schedule) as here:
        here.learner(4).finish()
        expected = [5e-3, 1e-2, 1e-2, 5e-3]
        assert rates(here) == pytest.approx(expected)
        for step in here.gateway.payloads("trainer.optimize_step"):
            assert {name: step["adam_params"][name] for name in adam.__struct_fields__} == {
                name: getattr(adam, name) for name in adam.__struct_fields__
            }
        lose(session, here.log, from_step=1)
        here.learner(5).finish()
        assert rates(here, 4) == pytest.approx([*expected, 2.5e-3])
        [recovered] = events(here.log, Recovered)
        assert recovered.resent_steps == (0, 1, 2, 3)


def lose(session: Session, log: Log, from_step: int) -> None:
    """Let the service forget the run's states from a step on."""
    gone = {event.state_uri for event in events(log, CheckpointSaved) if event.step >= from_step}
    for checkpoint in session.list_checkpoints():
        if checkpoint.uri in gone:
            session.delete_checkpoint(checkpoint)


def names(saves: Sequence[dict[str, Any]]) -> list[str]:
    """Return the names under which things were saved."""
    return [save["name"] for save in saves]


def test_what_is_saved_has_a_name_of_its_own_and_a_lifetime(
    tmp_path: Path, engine_dir: Path, session: Session
) -> None:
    """Saved, evaluated and last weights and all states stay; others live for a day or four deadlines."""
    with place(tmp_path, engine_dir, save_every=2, eval_every=3, group_deadline=30_000.0) as here:
        here.learner(5).finish()
        saves = here.gateway.payloads("trainer.save_weights")
        assert names(saves) == ["v000001", "v000002", "v000003", "v000004", "v000005"]
        assert DAY < 4 * 30_000
        assert [save.get("ttl_seconds") for save in saves] == [120_000, None, None, None, None]
        states = here.gateway.payloads("trainer.save_state")
        assert names(states) == ["s000000", "s000002", "s000004", "s000005"]
        assert {save.get("ttl_seconds") for save in states} == {None}
        lose(session, here.log, from_step=4)
        here.learner(6).finish()
        for kind, field in ((PolicyPublished, "weights_uri"), (CheckpointSaved, "state_uri")):
            uris = [getattr(event, field) for event in events(here.log, kind)]
            assert len(set(uris)) == len(uris), "also after a recovery no name is used again"
