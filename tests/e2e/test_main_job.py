"""The main job: rollout and learn as two processes on one log, then the audit."""

import json
import os
import random
import signal
import time
from pathlib import Path

import pytest

from core.events import Evaluated, StepPlanned
from engine import launch
from store.log import open_log
from tests.e2e.conftest import cli, committed, end, finish, start, wait_until

DATA = Path("../shared/data/hotpotqa-100")


def audit(run_dir: Path, steps: int) -> None:
    """Check that every step matches, that the log is sound, and that no ticket was skipped or used twice."""
    replay = cli("replay", "--run", run_dir, "--all")
    assert replay.status == 0, replay.out + replay.err
    assert f"{steps} steps replayed: all MATCH" in replay.out
    verify = cli("verify", "--run", run_dir, "--json")
    assert verify.status == 0, verify.out
    with open_log(run_dir, readonly=True) as log:
        planned = [log.plan(step) for step in range(steps)]
        tickets = [log.group(group.uid).ticket for plan in planned for group in plan.groups]
    assert all(isinstance(plan, StepPlanned) for plan in planned)
    assert len(tickets) == len(set(tickets))
    assert tickets == sorted(tickets)
    assert tickets == list(range(len(tickets)))


def test_two_processes_in_either_order_make_a_run_whose_every_step_matches(finished_run: Path) -> None:
    """The learner was started first, waited for the run, and rollout ended by itself at the goal."""
    assert committed(finished_run) == 3
    audit(finished_run, 3)


def test_replay_of_one_step_tells_what_it_was_made_of(finished_run: Path) -> None:
    """One step's report names groups, members, advantages and tokens by kind."""
    done = cli("replay", "--run", finished_run, "--step", 1, "--json")
    report = json.loads(done.out)
    assert done.status == 0
    assert report["match"] is True
    assert len(report["groups"]) == 8
    members = [member for group in report["groups"] for member in group["members"]]
    assert len(members) == report["members"] == 64
    group = report["groups"][0]
    mean = sum(member["reward"] for member in group["members"]) / 8
    for member in group["members"]:
        assert member["advantage"] == pytest.approx(member["reward"] - mean, abs=1e-12)
    assert {"prompt", "observation", "sampled"} <= report["tokens"].keys()
    lines = cli("replay", "--run", finished_run, "--step", 1).out.splitlines()
    assert max(map(len, lines)) <= 80, "a terminal's usual width"


def test_engine_digest_equals_the_plan(finished_run: Path) -> None:
    """What the engine says it received is what the plan recorded and replay re-derives."""
    with open_log(finished_run, readonly=True) as log:
        for step in range(3):
            index = log.step(step).committed_index
            assert index is not None
            event = log.journal.get(index).event
            assert event.engine_digest, "the embedded engine tells what it received"


def test_two_processes_of_a_step_share_an_audit(finished_run: Path) -> None:
    """Several processes give the same reports in the same order as one."""
    one = cli("replay", "--run", finished_run, "--all", "--json")
    two = cli("replay", "--run", finished_run, "--all", "--json", "--jobs", 2)
    assert one.status == two.status == 0
    assert one.out == two.out


def test_ctrl_c_and_start_again_goes_on_where_it_was(run_dir: Path) -> None:
    """Both commands are interrupted in the middle and started again; nothing is lost or repeated."""
    rollout = start("rollout", "--run", run_dir, "--preset", "demo")
    learn = start("learn", "--run", run_dir, "--max-steps", 5)
    wait_until(lambda: committed(run_dir) >= 2, "two committed steps")
    assert "Traceback" not in end(learn, signal.SIGINT)
    assert "Traceback" not in end(rollout, signal.SIGINT)
    learn, rollout = start("learn", "--run", run_dir), start("rollout", "--run", run_dir)
    finish(learn)
    finish(rollout)
    assert committed(run_dir) == 5
    audit(run_dir, 5)


def test_both_commands_outlive_their_engine(run_dir: Path) -> None:
    """The engine is killed in the middle of a run: both begin again with a new one, and every step matches."""
    rollout = start("rollout", "--run", run_dir, "--preset", "demo")
    learn = start("learn", "--run", run_dir, "--max-steps", 5)
    wait_until(lambda: committed(run_dir) >= 2, "two committed steps")
    address = launch.status(run_dir).address
    assert address is not None
    os.kill(address.pid, signal.SIGKILL)
    assert "the embedded engine died" in finish(learn)
    finish(rollout)
    assert committed(run_dir) == 5
    audit(run_dir, 5)


def test_a_learner_that_waits_notices_that_its_engine_was_stopped(run_dir: Path) -> None:
    """It waits for groups and calls nothing; a stop on purpose ends it with what to do, not with a new engine."""
    learn = start("learn", "--run", run_dir, "--preset", "demo", "--max-steps", 5)
    wait_until(lambda: checkpointed(run_dir), "the first checkpoint")
    launch.stop(run_dir, force=True)
    out, _ = learn.communicate(timeout=30)
    assert learn.returncode == 2
    assert "was stopped while it was in use. Start the command again" in out
    assert not launch.status(run_dir).running


def checkpointed(run_dir: Path) -> bool:
    """Return whether the state before step 0 is saved."""
    if not (run_dir / "log").exists():
        return False
    with open_log(run_dir, readonly=True) as log:
        return log.state().checkpoint_index is not None


def test_at_the_goal_both_commands_end_at_once_without_an_engine(finished_run: Path) -> None:
    """Nothing is left to do; a smaller goal is recorded, and the books stay as they are."""
    launch.stop(finished_run, force=True)
    log_of_engine = (finished_run / "engine" / "engine.log").read_bytes()
    for goal in ((), ("--max-steps", 2), ("--max-steps", 3)):
        done = cli("learn", "--run", finished_run, *goal)
        assert done.status == 0
        assert "nothing is left to do" in done.err
        assert cli("rollout", "--run", finished_run).err == "rollout: ended: goal\n"
    assert (finished_run / "engine" / "engine.log").read_bytes() == log_of_engine
    audit(finished_run, 3)


def test_the_demo_tells_the_whole_story(run_dir: Path) -> None:
    """A short demo evaluates, trains, draws, and replays every step."""
    done = cli("demo", "--run", run_dir, "--steps", 2, "--limit", 4)
    assert done.status == 0, done.out + done.err
    for words in ("step 2 of 2", "per training step", "never trained on", "2 steps replayed: all MATCH"):
        assert words in done.out


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_the_demo_learns_honestly(run_dir: Path) -> None:
    """The whole demo: the rise, the base it starts from, and that it reads instead of remembering."""
    finish(start("demo", "--run", run_dir))
    with open_log(run_dir, readonly=True) as log:
        events = [record.event for record in log.journal.read()]
    said = {event.name: event.summary for event in events if isinstance(event, Evaluated)}
    before, after = said["sampled-before"], said["sampled-after"]
    assert 0.15 <= before["exact_match"] <= 0.5
    assert before["format"] >= 0.7
    assert after["exact_match"] - before["exact_match"] >= 0.3
    assert after["exact_match_of_well_formed"] - before["exact_match_of_well_formed"] >= 0.15
    assert max(said["blind-before"]["exact_match"], said["blind-after"]["exact_match"]) <= 0.1


def kill_at_random(run_dir: Path, steps: int, kills: int, seed: int) -> None:
    """Kill rollout or learn `kills` times at random moments while a run of `steps` steps goes on."""
    dice = random.Random(seed)
    commands = {
        "rollout": ("rollout", "--run", run_dir, "--preset", "demo"),
        "learn": ("learn", "--run", run_dir, "--preset", "demo", "--max-steps", steps),
    }
    alive = {name: start(*command) for name, command in commands.items()}
    done = 0
    while done < kills:
        name = dice.choice(sorted(alive))
        time.sleep(dice.uniform(0.3, 4.0))
        if committed(run_dir) == steps:
            break
        end(alive[name], signal.SIGKILL)
        alive[name] = start(*commands[name])
        done += 1
    for process in alive.values():
        finish(process)
    assert committed(run_dir) == steps
    audit(run_dir, steps)


def test_sigkill_at_random_moments_changes_nothing(run_dir: Path) -> None:
    """Rollout or learn is killed four times in a run of four steps; every step matches, the books balance."""
    kill_at_random(run_dir, steps=4, kills=4, seed=1)


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", [11, 12, 13])
def test_twenty_kills_in_ten_steps(run_dir: Path, seed: int) -> None:
    """The same with twenty kills in a run of ten steps."""
    kill_at_random(run_dir, steps=10, kills=20, seed=seed)


def test_real_questions_and_passages_train(run_dir: Path) -> None:
    """HotpotQA through the search-r1 preset: both steps train on at least eight datums and match."""
    if not DATA.is_dir():
        pytest.skip("../shared/data/hotpotqa-100 is not here")
    scorer = "examples.scorers:character_overlap"
    settings = {
        "data.train": DATA / "questions.jsonl",
        "data.eval": DATA / "questions.jsonl",
        "tools.search.corpus": DATA / "corpus.jsonl",
        "rollout.max_trajectory_tokens": 2048,
        "rollout.group_size": 4,
        "learner.groups_per_step": 4,
        "reward.scorer": scorer,
    }
    options = [text for key, value in settings.items() for text in ("--set", f"{key}={value}")]
    rollout = start("rollout", "--run", run_dir, "--preset", "search-r1", *options, "--allow-code", scorer)
    learn = start("learn", "--run", run_dir, "--max-steps", 2, "--allow-code", scorer)
    finish(learn)
    finish(rollout)
    with open_log(run_dir, readonly=True) as log:
        for step in range(2):
            assert len(log.plan(step).datum_digests) >= 8
        passages = [
            record.event.content
            for group in log.plan(0).groups
            for record in log.groups.fetch(group.uid).records
            if record.event.__struct_config__.tag == "observation"
        ]
        assert sum(log.state().fates.values()) >= 8
    assert any(len(passage) > 300 for passage in passages), "real passages stand in the context"
    audit(run_dir, 2)
