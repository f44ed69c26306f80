"""What a run's lease promises: its credential, its model and source, whose it is, and where it may be reached."""

import os
import secrets
import socket
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from engine import launch
from engine.locks import Address
from tests.engine.support import Answer, Events, Wire, forward_payload

API = "/api/openapi/v1/service-sessions"
DAY = 24 * 3600.0


@pytest.fixture(scope="module")
def address(shared_run: Path) -> Iterator[Address]:
    """Return where the module's engine listens."""
    joined = launch.join(shared_run)
    yield joined.address
    os.close(joined.users)


@pytest.fixture
def wire(address: Address) -> Iterator[Wire]:
    """Open a raw client."""
    with Wire(address) as client:
        yield client


def open_session(wire: Wire) -> str:
    """Return a new session's id."""
    return str(wire.json("POST", API, {"sdk_version": "test"}).body["service_session_cuid"])


def open_training(wire: Wire, session: str) -> Answer:
    """Return the answer to a new training run of a session."""
    asked = {
        "base_model": "rolltape/tiny",
        "lora_rank": 4,
        "train_mlp": True,
        "train_attn": True,
        "train_unembed": True,
    }
    return wire.json("POST", f"{API}/{session}/training-runs", asked)


def open_sampling(wire: Wire, session: str, **fields: str) -> Answer:
    """Return the answer to a new sampling run of a session."""
    return wire.json("POST", f"{API}/{session}/sampling-runs", {"base_model": "rolltape/tiny"} | fields)


def sample(wire: Wire, run: str, **changes: object) -> Answer:
    """Return the answer to one sampling request."""
    body: dict[str, object] = {
        "request_id": secrets.token_hex(4),
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [5, 6, 7]}]},
        "sampling_params": {"max_tokens": 2, "seed": 1, "temperature": 1.0, "top_p": 1.0, "top_k": -1},
        "num_samples": 1,
        "return_text": True,
        "return_token_logprobs": True,
        "return_prompt_logprobs": False,
        "topk_prompt_logprobs": 0,
    }
    return wire.json("POST", f"/v1/sampling-runs/{run}/sample", body | changes)


def test_a_credential_lasts_for_weeks(wire: Wire) -> None:
    """With less than 300 s left the SDK would renew before every request."""
    session = open_session(wire)
    opened = open_training(wire, session)
    run = opened.body["training_run_cuid"]
    renewed = wire.json("POST", f"/api/openapi/v1/training-runs/{run}/renew", {})
    for answer in (opened, renewed, open_sampling(wire, session)):
        assert answer.status == 200, answer
        left = datetime.fromisoformat(answer.body["actor_jwt"]["expires_at"]).timestamp() - time.time()
        assert 7 * DAY < left < 60 * DAY


def test_an_unknown_model_or_source_makes_no_run(wire: Wire) -> None:
    """For training and for sampling, by name and by URI."""
    session = open_session(wire)
    answer = open_sampling(wire, session, base_model="other/model")
    assert (answer.status, answer.body["code"]) == (404, "model_not_found")
    assert "rolltape/tiny" in answer.body["message"]
    gone = "trio://run-0000000000000000/weights/never"
    answer = open_sampling(wire, session, source_checkpoint_uri=gone)
    assert (answer.status, answer.body["code"]) == (404, "checkpoint_not_found")
    run = open_training(wire, session).body["training_run_cuid"]
    rebind = {"source_checkpoint_uri": gone, "restore_optimizer": True}
    answer = wire.json("PATCH", f"{API}/{session}/training-runs/{run}", rebind)
    assert (answer.status, answer.body["code"]) == (404, "checkpoint_not_found")


def test_a_run_that_has_started_takes_no_other_source(wire: Wire) -> None:
    """What was trained would be lost unseen."""
    run = wire.open_run()
    sequence = Events(wire, run)
    assert sequence.init().body["status"] == "succeeded"
    saved = sequence.post("trainer.save_state", {"name": "first"}).body["result"]["checkpoint"]["uri"]
    rebind = {"source_checkpoint_uri": saved, "restore_optimizer": True}
    other = wire.open_run()
    session = open_session(wire)
    path = f"{API}/{session}/training-runs"
    answer = wire.json("PATCH", f"{path}/{run}", rebind)
    assert (answer.status, answer.body["code"]) == (409, "run_initialized")
    assert wire.json("PATCH", f"{path}/{other}", rebind).status == 200


def test_two_clients_train_and_sample_beside_each_other(address: Address) -> None:
    """The end of one session takes its own runs with it and leaves the other's as they were."""
    with Wire(address) as mine, Wire(address) as theirs:
        one, other = open_session(mine), open_session(theirs)
        run, kept = (
            Events(wire, open_training(wire, session).body["training_run_cuid"])
            for wire, session in ((mine, one), (theirs, other))
        )
        for sequence in (run, kept):
            assert sequence.init().body["status"] == "succeeded"
        sampler, kept_sampler = (
            open_sampling(wire, session).body["sampling_run_cuid"]
            for wire, session in ((mine, one), (theirs, other))
        )
        first = sample(mine, sampler).body["sequences"]
        assert sample(theirs, kept_sampler).body["sequences"] == first
        for sequence in (run, kept):
            assert sequence.post("trainer.forward_backward", forward_payload()).body["status"] == "succeeded"
        for _ in range(2):
            assert mine.json("POST", f"{API}/{one}/close", {"status": "ENDED"}).status // 100 == 2
        assert run.post("trainer.forward", forward_payload()).body["code"] == "run_not_found"
        assert sample(mine, sampler).body["code"] == "sampling_run_not_found"
        adam = {
            "learning_rate": 1e-3,
            "beta1": 0.9,
            "beta2": 0.95,
            "eps": 1e-12,
            "weight_decay": 0.0,
            "grad_clip_norm": 1.0,
        }
        assert kept.post("trainer.optimize_step", {"adam_params": adam}).body["status"] == "succeeded"
        assert sample(theirs, kept_sampler).body["sequences"] == first


def test_unknown_events_and_fields_are_told_and_harm_nothing(wire: Wire) -> None:
    """An event of another kind is refused and does not count; a field that nobody knows is passed over."""
    sequence = Events(wire, wire.open_run())
    assert sequence.init().body["status"] == "succeeded"
    answer = sequence.post("trainer.explode", {})
    assert 400 <= answer.status < 500
    assert isinstance(answer.body["message"], str)
    assert (
        sequence.post("trainer.forward", forward_payload() | {"future": [1, 2]}).body["status"] == "succeeded"
    )
    assert sequence.post("trainer.forward", forward_payload(), future="x").body["status"] == "succeeded"


def test_it_listens_on_loopback_only(address: Address) -> None:
    """No other address of this machine answers, with or without the token."""
    port = urlsplit(address.url).port
    assert port is not None
    rows = [
        line.split()
        for table in ("/proc/net/tcp", "/proc/net/tcp6")
        if Path(table).exists()
        for line in Path(table).read_text(encoding="ascii").splitlines()[1:]
    ]
    listening = {
        row[1].rpartition(":")[0]
        for row in rows
        if row[3] == "0A" and int(row[1].rpartition(":")[2], 16) == port
    }
    assert listening == {"0100007F"}
    with pytest.raises(OSError), socket.create_connection(("127.0.0.2", port), timeout=2):
        pass
