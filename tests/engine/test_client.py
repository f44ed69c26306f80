"""The session that rollout, learner and cli use: embedded over HTTP, and the hosted kind's refusals."""

import functools
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
from pytrio import PyTrioError

from core.config import AdamSettings, EngineSettings
from core.datum import DatumArrays
from core.digests import payload_digest
from core.errors import (
    CredentialsMissing,
    EngineDied,
    EngineError,
    ServiceBusy,
    ServiceRefused,
    TrainerBroken,
    WeightsGone,
)
from engine import launch
from engine.client import Session, connect, prepare
from engine.faults import translate, translated
from tests.engine.support import finish, start_program, until

ADAM = AdamSettings()
PROMPT = np.arange(40, 60, dtype=np.int32)


@pytest.fixture(scope="module")
def session(shared_run: Path) -> Iterator[Session]:
    """Open a session with an engine that the module shares."""
    with connect(EngineSettings(), shared_run) as opened:
        yield opened


def datum(length: int = 12, shift: int = 0, advantage: float = 0.5) -> DatumArrays:
    """Return a small datum."""
    tokens = np.arange(40 + shift, 41 + shift + length, dtype=np.int64)
    logprobs = np.full(length, -1.0, np.float32)
    return DatumArrays(tokens[:-1], tokens[1:], logprobs, np.full(length, advantage, np.float32))


def run(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run one asynchronous call."""
    return anyio.run(functools.partial(function, *args, **kwargs))


def test_sampling_is_repeatable_whoever_else_samples(session: Session) -> None:
    """A request gives the same alone, among forty others, and after another session's sampling."""
    sample = functools.partial(session.sample, "", PROMPT, num_samples=2, max_tokens=24, temperature=3.0)
    alone = run(sample, seed=5)

    async def crowd() -> list[Any]:
        results: list[Any] = [None] * 40

        async def one(seed: int) -> None:
            results[seed] = await sample(seed=seed)

        async with anyio.create_task_group() as group:
            for seed in range(40):
                group.start_soon(one, seed)
        return results

    together = anyio.run(crowd)
    for a, b in zip(alone, together[5], strict=True):
        np.testing.assert_array_equal(a.tokens, b.tokens)
        np.testing.assert_array_equal(a.logprobs, b.logprobs)
        assert (a.text, a.stop_reason) == (b.text, b.stop_reason)
    assert alone[0].tokens.dtype == np.int32
    assert alone[0].logprobs.dtype == np.float32
    assert len({tuple(result[0].tokens) for result in together}) > 20


def test_stop_and_logprobs(session: Session) -> None:
    """Stop ids end a sequence; compute_logprobs gives float32 with 0 first, and the model's own values."""
    (free,) = run(session.sample, "", PROMPT, num_samples=1, seed=1, max_tokens=8, temperature=5.0)
    stop = [int(free.tokens[0])]
    (cut,) = run(session.sample, "", PROMPT, num_samples=1, seed=1, max_tokens=8, temperature=5.0, stop=stop)
    assert cut.tokens.tolist() == stop
    assert cut.stop_reason == "stop"
    logprobs = run(session.compute_logprobs, "", np.concatenate([PROMPT, free.tokens]))
    assert logprobs.dtype == np.float32
    assert logprobs[0] == 0
    np.testing.assert_allclose(logprobs[len(PROMPT) :], free.logprobs, atol=1e-5)


def test_a_training_step_and_its_digest(session: Session) -> None:
    """The engine reports the digest of exactly what was sent, in the calls in which it was sent."""
    trainer = session.create_trainer(lora_rank=8, seed=1)
    batches = [prepare([datum(), datum(9, 3, 0.0)]), prepare([datum(20, 5, -1.0)])]
    for batch in batches:
        logprobs = trainer.forward_backward(batch, "importance_sampling", {})
        assert [len(row) for row in logprobs] == [len(d.model_input) for d in batch.datums]
    result = trainer.optim_step(1e-3, ADAM)
    assert result.engine_digest == payload_digest([batch.digests for batch in batches])
    assert result.metrics["grad_norm"] > 0
    assert not any(name.startswith("payload") for name in result.metrics)
    # The gradient, and with it the record of what made it, starts anew with every step.
    trainer.forward_backward(batches[1], "ppo", {"clip_low_threshold": 0.5})
    assert trainer.optim_step(1e-3, ADAM).engine_digest == payload_digest([batches[1].digests])


def test_seeded_faults_show_in_the_digest(session: Session) -> None:
    """Shifted logprobs, an inverted mask, a dropped micro-batch and a wrong scale all change it."""
    trainer = session.create_trainer(lora_rank=4, seed=1)
    right = datum()._replace(logprobs=-np.arange(12, dtype=np.float32), advantages=np.float32([0, 1] * 6))
    planned = payload_digest([prepare([right]).digests, prepare([datum()]).digests])
    wrong = (
        right._replace(logprobs=np.roll(right.logprobs, 1)),
        right._replace(advantages=np.float32([1, 0] * 6)),
        right._replace(advantages=right.advantages * np.float32(0.5)),
    )
    for sent in ([right, datum()], *([one, datum()] for one in wrong), [right]):
        for one in sent:
            trainer.forward_backward(prepare([one]), "importance_sampling", {})
        matches = trainer.optim_step(1e-4, ADAM).engine_digest == planned
        assert matches == (sent[0] is right and len(sent) == 2)


def test_weights_come_and_go(session: Session) -> None:
    """Saved weights change what is sampled, are listed, and once deleted are WeightsGone."""
    trainer = session.create_trainer(lora_rank=8, seed=1)
    trainer.forward_backward(prepare([datum()]), "importance_sampling", {})
    trainer.optim_step(1e-2, ADAM)
    uri = trainer.save_weights("v1", ttl_seconds=3600)
    assert session.can_sample(uri)
    assert session.can_sample("")
    sample = functools.partial(
        session.sample, prompt=PROMPT, num_samples=1, seed=1, max_tokens=20, temperature=1.5
    )
    assert run(sample, uri)[0].logprobs[0] != run(sample, "")[0].logprobs[0]
    (listed,) = [item for item in session.list_checkpoints() if item.uri == uri]
    assert (listed.kind, listed.training_run) == ("sampler", trainer.training_run)
    assert listed.expires_at == pytest.approx(listed.created_at + 3600)
    session.delete_checkpoint(listed)
    session.delete_checkpoint(listed)
    with pytest.raises(WeightsGone, match="gone"):
        run(sample, uri)
    assert not session.can_sample(uri)
    assert not session.can_sample("trio://run-0000000000000000/weights/never")


def test_restoring_goes_on_byte_identically(session: Session, shared_run: Path) -> None:
    """A restored trainer has the weights and the optimizer: the next step is the same to the bit."""

    def step(trainer: Any) -> bytes:
        trainer.forward_backward(prepare([datum(), datum(7, 2)]), "importance_sampling", {})
        trainer.optim_step(5e-3, ADAM)
        run_id, kind, name = trainer.save_weights("after").removeprefix("trio://").split("/")
        folder = shared_run / "engine" / "runs" / run_id / kind
        return (folder / f"{name}.npz").read_bytes()

    trainer = session.create_trainer(lora_rank=8, seed=4)
    trainer.forward_backward(prepare([datum()]), "importance_sampling", {})
    trainer.optim_step(5e-3, ADAM)
    state = trainer.save_state("half")
    expected = step(trainer)
    assert step(session.restore_trainer(state)) == expected
    with pytest.raises(WeightsGone, match="nowhere"):
        session.restore_trainer(state.replace("half", "nowhere"))


def test_bad_input_is_refused_in_words(session: Session) -> None:
    """Tokens outside the vocabulary, an unknown loss and a taken name name the fault; the run goes on."""
    trainer = session.create_trainer(lora_rank=4, seed=1)
    beyond = prepare([datum()._replace(inputs=np.full(12, 10**6))])
    with pytest.raises(ServiceRefused, match="vocabulary"):
        trainer.forward_backward(beyond, "importance_sampling", {})
    with pytest.raises(ServiceRefused, match="no_such_loss"):
        trainer.forward_backward(prepare([datum()]), "no_such_loss", {})
    with pytest.raises(ServiceRefused, match="betta"):
        trainer.forward_backward(prepare([datum()]), "dro", {"betta": 1.0})
    trainer.save_state("s")
    with pytest.raises(ServiceRefused, match="exists already"):
        trainer.save_state("s")
    with pytest.raises(ServiceRefused, match="context"):
        run(session.sample, "", np.full(4000, 50), num_samples=1, seed=1, max_tokens=4)
    assert trainer.save_state("t")


def test_cancelling_a_sample_leaves_the_session_usable(session: Session) -> None:
    """A cancelled request ends at once for the caller, and is dropped by the engine while it waits."""

    async def scenario() -> float:
        sample = functools.partial(session.sample, "", PROMPT, seed=1)
        await sample(num_samples=1, max_tokens=1)
        started = time.monotonic()
        with anyio.move_on_after(0.05):
            await sample(num_samples=8, max_tokens=200, temperature=5.0)
        elapsed = time.monotonic() - started
        (after,) = await sample(num_samples=1, max_tokens=2)
        assert len(after.tokens) >= 1
        return elapsed

    assert anyio.run(scenario) < 1


def test_tokenizer_and_fingerprints(session: Session) -> None:
    """The tokenizer is the base model's, loaded without a network, and identified with its template."""
    tokenizer = session.tokenizer()
    text = "Ünïcode ☃ and 中文, exactly."
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    prints = session.fingerprints()
    assert set(prints) == {"sdk", "base_model", "tokenizer"}
    assert prints["sdk"].startswith("pytrio ")
    assert len(prints["base_model"]) == len(prints["tokenizer"]) == 64
    assert session.model_name == "rolltape/tiny"
    assert repr(session).startswith("<Session rolltape/tiny open")


def test_a_closed_session_says_so(run_dir: Path) -> None:
    """Closing ends the SDK's session at the engine and lets the engine go; later calls are refused."""
    with connect(EngineSettings(), run_dir) as session:
        trainer = session.create_trainer(lora_rank=4, seed=1)
        trainer.save_state("s")
        assert launch.status(run_dir).sessions == 1
    status = launch.status(run_dir)
    assert (status.sessions, status.training_runs, status.in_use) == (0, 0, False)
    session.close()
    with pytest.raises(EngineError, match="closed"):
        trainer.save_state("t")
    with pytest.raises(EngineError, match="closed"):
        session.create_trainer(lora_rank=4, seed=1)
    assert "closed" in repr(session)


class Frozen:
    """Settings of an SDK that cannot be changed once it runs."""

    __slots__ = ()


@pytest.mark.parametrize("lacks", ["_runtime", "shutdown", "configuration"])
def test_an_sdk_without_its_private_door_ends_its_session_too(run_dir: Path, lacks: str) -> None:
    """Its client is dropped and collected instead, or closed with the patience that it has."""
    with connect(EngineSettings(), run_dir) as session:
        session.create_trainer(lora_rank=4, seed=1)
        assert launch.status(run_dir).sessions == 1
        inside = vars(session._open())
        if lacks == "_runtime":
            inside["_renamed"] = inside.pop("_runtime")
        elif lacks == "shutdown":
            inside["_runtime"].shutdown = None
        else:
            inside["_runtime"].configuration = Frozen()
        del inside
    status = launch.status(run_dir)
    assert (status.sessions, status.training_runs, status.in_use) == (0, 0, False)


def test_the_death_of_the_engine_ends_sampling_and_training(run_dir: Path) -> None:
    """Both kinds of call fail with EngineDied within 2 s; a new session restores what was saved."""
    with connect(EngineSettings(), run_dir) as session:
        trainer = session.create_trainer(lora_rank=4, seed=1)
        state = trainer.save_state("s")
        address = launch.status(run_dir).address
        assert address is not None

        async def sample_until_death() -> None:
            async def one() -> None:
                while True:
                    await session.sample("", PROMPT, num_samples=4, seed=1, max_tokens=30)

            async with anyio.create_task_group() as group:
                for _ in range(8):
                    group.start_soon(one)
                await anyio.sleep(0.1)
                os.kill(address.pid, 9)

        started = time.monotonic()
        with pytest.raises(ExceptionGroup) as caught:
            anyio.run(sample_until_death)
        assert caught.group_contains(EngineDied)
        with pytest.raises(EngineDied):
            trainer.save_state("t")
        assert time.monotonic() - started < 2.5
        until(lambda: launch.has_ended(address.pid), "the end of the engine")
    with connect(EngineSettings(), run_dir) as session:
        assert session.restore_trainer(state).save_state("t")


def test_a_wrong_base_model_is_refused(run_dir: Path) -> None:
    """The embedded engine has its own model only; the engine is let go again."""
    with pytest.raises(ServiceRefused, match="Qwen3"):
        connect(EngineSettings(base_model="Qwen/Qwen3.5-4B"), run_dir)
    assert not launch.status(run_dir).in_use


HOSTED = """
import sys, time
from pathlib import Path
from core.config import EngineSettings
from core.errors import EngineError
from engine.client import connect
started = time.monotonic()
try:
    connect(EngineSettings(kind="pytrio", base_model=sys.argv[1]), Path("run"))
except EngineError as exc:
    print(type(exc).__name__, "|", exc, "|", time.monotonic() - started < 2)
"""


def test_the_hosted_service_without_credentials(tmp_path: Path) -> None:
    """Without a key the error comes at once, says what to do, and nothing is contacted or written."""
    home = {"HOME": str(tmp_path), "PYTRIO_API_KEY": "", "PYTRIO_BASE_URL": "http://127.0.0.1:9"}
    out = finish(start_program(HOSTED, "Qwen/Qwen3.5-4B", **home))
    kind, message, quick = out.strip().split(" | ")
    assert kind == "CredentialsMissing"
    assert "trio login" in message
    assert "PYTRIO_API_KEY" in message
    assert quick == "True"
    assert list(tmp_path.iterdir()) == []
    out = finish(start_program(HOSTED, "", **home))
    assert out.startswith("ServiceRefused | engine.base_model is empty")


HOSTED_STEP = """
import sys
from pathlib import Path
import anyio
import numpy as np
from core.config import AdamSettings, EngineSettings
from core.datum import DatumArrays
from engine.client import connect, prepare
ones = np.ones(9, np.float32)
batch = prepare([DatumArrays(np.arange(40, 49), np.arange(41, 50), -ones, ones)])
settings = EngineSettings(kind="pytrio", base_model="rolltape/tiny", request_timeout=2)
with connect(settings, Path("run")) as session:
    trainer = session.create_trainer(lora_rank=4, seed=1)
    trainer.forward_backward(batch, "importance_sampling", {})
    print(trainer.optim_step(1e-3, AdamSettings()).metrics["grad_norm"] > 0)
    async def sample(uri):
        return await session.sample(uri, np.arange(40, 50), num_samples=2, seed=1, max_tokens=3)
    print(len(anyio.run(sample, trainer.save_weights("w"))))
"""


def test_the_hosted_kind_takes_the_same_path(session: Session, tmp_path: Path, shared_run: Path) -> None:
    """With an address and a key from the environment, the hosted kind trains and samples alike."""
    address = launch.status(shared_run).address
    assert address is not None
    env = {
        "HOME": str(tmp_path),
        "PYTRIO_BASE_URL": address.url,
        "PYTRIO_API_KEY": address.token,
        "NO_PROXY": "127.0.0.1",
    }
    assert finish(start_program(HOSTED_STEP, **env)).split() == ["True", "2"]
    wrong = start_program(HOSTED, "rolltape/tiny", **(env | {"PYTRIO_API_KEY": "wrong"}))
    assert finish(wrong).startswith("CredentialsMissing | opening a session with PyTRIO failed")
    dead = start_program(HOSTED_STEP, **(env | {"PYTRIO_BASE_URL": "http://127.0.0.1:9"}))
    _, err = dead.communicate(timeout=60)
    assert "ServiceBusy: opening a session with PyTRIO failed" in err


def sdk_error(code: str = "x", status: int = 0, source: str = "control") -> PyTrioError:
    """Return an SDK error."""
    return PyTrioError("it broke", code=code, status_code=status, source=source)


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (sdk_error("unauthorized", 401), CredentialsMissing, "trio login"),
        (sdk_error("api_key_expired", 403), CredentialsMissing, "trio login"),
        (sdk_error("billing_insufficient_balance", 402), ServiceRefused, "balance"),
        (sdk_error("other", 402), ServiceRefused, "balance"),
        (sdk_error("too_many_requests", 429), ServiceBusy, "later"),
        (sdk_error("actor_capacity_exceeded", 429), ServiceBusy, "later"),
        (sdk_error("whatever", 503), ServiceBusy, "later"),
        (sdk_error("control.request_failed"), ServiceBusy, "later"),
        (sdk_error("forbidden", 403), ServiceRefused, "permission"),
        (sdk_error("validation.empty_prompt", source="sdk"), ServiceRefused, "arguments"),
        (sdk_error("invalid_input", source="event"), ServiceRefused, "it broke"),
        (sdk_error("checkpoint_not_found", 404), WeightsGone, "gone"),
        (sdk_error("not_found", 404), WeightsGone, "gone"),
        (sdk_error("model_not_found", 404), ServiceRefused, "supported"),
        (sdk_error("training.run_broken"), TrainerBroken, "checkpoint"),
        (sdk_error("run_not_found", 404, "actor"), TrainerBroken, "checkpoint"),
        (sdk_error("surprise"), EngineError, "surprise"),
        (ValueError("bad shape"), ServiceRefused, "bad shape"),
        (RuntimeError("loop is closed"), EngineError, "loop is closed"),
    ],
)
def test_sdk_errors_become_ours(error: Exception, kind: type[EngineError], words: str) -> None:
    """Each family of SDK errors has one class here, and a message with what failed and what to do."""
    uri = "" if "run_not_found" in str(getattr(error, "code", "")) else "trio://run/weights/w"
    ours = translate(error, "training", uri=uri)
    assert type(ours) is kind
    assert str(ours).startswith("training failed: ")
    assert words in str(ours)
    with pytest.raises(kind), translated("training", uri=uri):
        raise error


def test_a_batch_split_by_the_sdk_is_one_batch(run_dir: Path, session: Session) -> None:
    """With small caps the SDK splits a call; gradient and payload digest are those of the whole."""
    folder = launch.engine_folder(run_dir)
    command = [sys.executable, "-m", "engine.embedded.server", "--dir", str(folder)]
    server = subprocess.Popen([*command, "--max-batch-size", "2"], env=launch.engine_environment())
    try:
        batch = prepare([datum(5 + number, number, number - 2.0) for number in range(5)])
        norms = []
        with connect(EngineSettings(), run_dir) as small:
            assert small.fingerprints() == session.fingerprints()
            for opened in (session, small):
                for loss in ("importance_sampling", "ppo", "cispo", "dro"):
                    trainer = opened.create_trainer(lora_rank=4, seed=1)
                    rows = trainer.forward_backward(batch, loss, {})
                    assert [len(row) for row in rows] == [5, 6, 7, 8, 9]
                    result = trainer.optim_step(1e-3, ADAM)
                    assert result.engine_digest == payload_digest([batch.digests])
                    norms.append(result.metrics["grad_norm"])
        assert norms[:4] == pytest.approx(norms[4:], rel=1e-5)
    finally:
        server.terminate()
        server.wait(20)
