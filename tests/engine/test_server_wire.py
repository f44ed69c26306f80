"""What the engine answers to clients that are late, repeat themselves, or are up to no good."""

import hashlib
import http.client
import io
import os
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
import numpy as np
import pytest

from engine import launch
from engine.embedded.checkpoints import CheckpointStore, RunRecord
from engine.embedded.wire import Refused, Save
from engine.locks import Address
from tests.engine.support import Events, Wire, forward_payload, until

API = "/api/openapi/v1"


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


@pytest.fixture
def events(wire: Wire) -> Events:
    """Open a training run with its weights."""
    sequence = Events(wire, wire.open_run())
    assert sequence.init().body["status"] == "succeeded"
    return sequence


def test_an_event_is_run_once(events: Events) -> None:
    """A repeated event id is told so, changes nothing, and its answer can be asked for again."""
    before = events.post("trainer.forward_backward", forward_payload())
    envelope = events.envelope("trainer.optimize_step", {"adam_params": ADAM})
    body = msgspec.msgpack.encode(envelope)
    first = events.wire.send("POST", "/v1/events", body)
    again = events.wire.send("POST", "/v1/events", body)
    assert (again.status, again.body["code"]) == (409, "event_exists")
    path = f"/v1/events/{envelope['event_id']}"
    answers = [events.wire.send("GET", path, headers={"Prefer": "wait=5"}) for _ in range(2)]
    assert answers[0] == answers[1]
    assert answers[0].body["status"] == "succeeded"
    assert first.body["event_id"] == envelope["event_id"]
    assert before.body["status"] == "succeeded"


def test_events_come_in_order(events: Events) -> None:
    """A gap in the sequence is refused, and the right event is taken after it."""
    events.index += 1
    refused = events.post("trainer.forward", forward_payload())
    assert (refused.status, refused.body["code"]) == (409, "event_out_of_order")
    events.index -= 1
    assert events.post("trainer.forward", forward_payload()).body["status"] == "succeeded"


def test_a_long_event_is_long_polled(events: Events) -> None:
    """An event that takes longer than its POST may answers `running`, then its end."""
    envelope = events.envelope("trainer.forward", forward_payload(length=2000, count=4))
    body = msgspec.msgpack.encode(envelope)
    posted = events.wire.send("POST", "/v1/events", body)
    path = f"/v1/events/{envelope['event_id']}"
    assert posted.body["status"] == "running"
    assert events.wire.send("GET", path).body["status"] == "running"
    ended = events.wire.send("GET", path, headers={"Prefer": "wait=60"})
    assert ended.body["status"] == "succeeded"
    assert ended.body["usage"]["input_tokens"] == 8_000


def test_the_engine_answers_while_it_computes(events: Events, address: Address) -> None:
    """Heartbeats and lists are answered while a long event runs."""
    events.wire.send(
        "POST",
        "/v1/events",
        msgspec.msgpack.encode(events.envelope("trainer.forward", forward_payload(length=2000, count=4))),
    )
    with Wire(address) as other:
        assert other.json("POST", "/v1/client/heartbeat", {}).body["heartbeat_ms"] > 0
        assert other.send("GET", f"{API}/training-runs").status == 200
        status = other.send("GET", "/engine/status")
    assert status.status == 200
    events.index += 1
    assert events.post("trainer.forward", forward_payload()).body["status"] == "succeeded"


def test_wrong_token_host_and_size_are_refused(address: Address) -> None:
    """Without the token, under another Host, or with too large a body, nothing is served."""
    for token in ("", "wrong", "\u00e9"):
        with Wire(address, token=token) as stranger:
            assert stranger.send("GET", f"{API}/api-key/verify").status == 401
            assert stranger.send("POST", "/engine/stop").status == 401
    with Wire(address) as wire:
        for host in ("evil.example", "localhost.evil.example", "127.0.0.1:1", ""):
            answer = wire.send("GET", "/api/models", headers={"Host": host})
            assert (answer.status, answer.body["code"]) == (403, "forbidden"), host
        port = urlsplit(address.url).port
        assert wire.send("GET", "/api/models", headers={"Host": f"localhost:{port}"}).status == 200
    parts = urlsplit(address.url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=10)
    connection.putrequest("POST", "/v1/events")
    connection.putheader("Authorization", f"Bearer {address.token}")
    connection.putheader("Content-Length", str(2**31))
    connection.endheaders()
    assert connection.getresponse().status == 413
    connection.close()


@pytest.mark.parametrize(
    "name", ["../../../evil", "/etc/passwd", "a/b", "..", ".", "", "a\0b", "x" * 201, "-a", "a."]
)
def test_checkpoint_names_cannot_leave_their_folder(events: Events, name: str) -> None:
    """A name that is not a plain file name is refused, and the run goes on."""
    for kind in ("trainer.save_state", "trainer.save_weights"):
        answer = events.post(kind, {"name": name})
        assert answer.body["status"] == "failed"
        assert answer.body["error"]["code"] == "invalid_checkpoint_name"
    assert events.post("trainer.save_state", {"name": "good"}).body["status"] == "succeeded"


@pytest.mark.parametrize(
    "uri", ["trio://run-0/../../state/x", "file:///etc/passwd", "", "trio://" + "x" * 3000]
)
def test_checkpoint_uris_cannot_leave_their_folder(wire: Wire, uri: str) -> None:
    """A URI that is not one of ours names no checkpoint."""
    sequence = Events(wire, wire.open_run())
    lora = {"rank": 4, "train_mlp": True, "train_attn": True, "train_unembed": True}
    payload = {"base_model": "rolltape/tiny", "lora_config": lora, "checkpoint_uri": uri}
    answer = sequence.post("trainer.init_run", payload)
    assert answer.body["error"]["code"] == "checkpoint_not_found"


def test_unfinished_runs_and_unknown_ids(wire: Wire) -> None:
    """Events before init fail; unknown runs, events and paths are 404; a second init fails."""
    sequence = Events(wire, wire.open_run())
    for kind, payload in (
        ("trainer.forward", forward_payload()),
        ("trainer.optimize_step", {"adam_params": ADAM}),
        ("trainer.save_state", {"name": "x"}),
    ):
        assert sequence.post(kind, payload).body["error"]["code"] == "run_not_initialized"
    assert sequence.init().body["status"] == "succeeded"
    assert sequence.init().body["error"]["code"] == "run_initialized"
    lost = Events(wire, "run-unknown")
    assert lost.post("trainer.forward", forward_payload()).body["code"] == "run_not_found"
    assert wire.send("GET", "/v1/events/event_unknown").body["code"] == "event_not_found"
    assert wire.send("GET", "/nowhere").status == 404
    assert wire.send("DELETE", "/v1/events").status == 405


def test_a_failed_event_changes_nothing(events: Events) -> None:
    """A refused forward_backward leaves no gradient and no trace in the payload digest."""
    good = forward_payload()
    bad = forward_payload()
    bad["data"] = [bad["data"][0] | {"advantages": [float("nan")] * 8}]  # type: ignore[index]
    results = []
    for spoil in (False, True):
        sequence = Events(events.wire, events.wire.open_run())
        sequence.init()
        if spoil:
            assert sequence.post("trainer.forward_backward", bad).body["status"] == "failed"
        sequence.post("trainer.forward_backward", good)
        results.append(sequence.post("trainer.optimize_step", {"adam_params": ADAM}).body["result"])
    assert results[0] == results[1]


def test_a_split_call_is_one_call(events: Events) -> None:
    """Events with the same step are one forward_backward call in the payload digest."""
    digests = []
    for steps in ((0, 0), (0, 1)):
        sequence = Events(events.wire, events.wire.open_run())
        sequence.init()
        for step in steps:
            sequence.step = step
            sequence.post("trainer.forward_backward", forward_payload())
        metrics = sequence.post("trainer.optimize_step", {"adam_params": ADAM}).body["result"]
        digests.append([metrics["metrics"][f"payload_digest_{word}"] for word in range(8)])
    assert digests[0] != digests[1]


def test_expired_weights_are_gone_at_once(events: Events) -> None:
    """A checkpoint whose lifetime has ended can be neither sampled nor listed."""
    saved = events.post("trainer.save_weights", {"name": "brief", "ttl_seconds": 1})
    uri = saved.body["result"]["checkpoint"]["uri"]
    session = events.wire.json("POST", f"{API}/service-sessions", {"sdk_version": "test"}).body
    path = f"{API}/service-sessions/{session['service_session_cuid']}/sampling-runs"
    asked = {"base_model": "rolltape/tiny", "source_checkpoint_uri": uri}
    run = events.wire.json("POST", path, asked)
    sample = {
        "request_id": "r",
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [5]}]},
        "sampling_params": {"max_tokens": 1},
    }
    sampling = f"/v1/sampling-runs/{run.body['sampling_run_cuid']}/sample"
    assert events.wire.json("POST", sampling, sample).status == 200

    def gone() -> bool:
        return events.wire.json("POST", sampling, sample).status == 404

    until(gone, "the end of a one-second lifetime", 5)
    refused = events.wire.json("POST", path, asked)
    assert (refused.status, refused.body["code"]) == (404, "checkpoint_not_found")
    listed = events.wire.send("GET", f"{API}/checkpoints?limit=1000").body["checkpoints"]
    assert uri not in [item["checkpoint_uri"] for item in listed]


ADAM = {
    "learning_rate": 1e-3,
    "beta1": 0.9,
    "beta2": 0.95,
    "eps": 1e-12,
    "weight_decay": 0.0,
    "grad_clip_norm": 0.0,
}


def record(run: str = "run-00000000000000aa") -> RunRecord:
    """Return a run's record."""
    return RunRecord(run, "session", "base", 4, True, True, True, None, "", False, 1.0)


def test_the_store_survives_a_restart_and_half_written_files(tmp_path: Path) -> None:
    """What was saved is found again; leftovers and foreign files are ignored, damage is named."""
    store = CheckpointStore(tmp_path)
    run = record()
    store.add_run(run)
    arrays = {"a": np.arange(3, dtype=np.float32)}
    kept = store.save(run.training_run, "state", Save("kept"), arrays, step=4)
    store.save(run.training_run, "weights", Save("brief", ttl_seconds=1), arrays, step=4)
    folder = tmp_path / "runs" / run.training_run
    (folder / "state" / ".half.npz.0.tmp").write_bytes(b"half")
    (folder / "state" / "orphan.npz").write_bytes(b"no json beside it")
    (folder / "state" / "foreign.json").write_text("{}")

    again = CheckpointStore(tmp_path)
    assert again.find(kept.uri) == kept
    np.testing.assert_array_equal(again.load(kept)["a"], arrays["a"])
    assert again.run(run.training_run) == run
    assert not (folder / "state" / ".half.npz.0.tmp").exists()
    assert (folder / "state" / "foreign.json").exists()
    assert {path.stat().st_mode & 0o777 for path in folder.glob("*/kept.*")} == {0o600}

    (folder / "state" / "kept.npz").write_bytes(b"other bytes")
    with pytest.raises(Refused, match="differs from what was saved"):
        again.load(kept)
    (folder / "state" / "kept.npz").unlink()
    with pytest.raises(Refused, match="cannot read"):
        again.load(kept)
    again.delete(kept)
    again.delete(kept)
    with pytest.raises(Refused, match="no checkpoint"):
        again.find(kept.uri)


def test_a_pickle_is_never_loaded(tmp_path: Path) -> None:
    """An array file that needs unpickling is refused even with the right digest."""

    class Bomb:
        def __reduce__(self) -> tuple[object, ...]:
            return (Path(tmp_path / "exploded").touch, ())

    store = CheckpointStore(tmp_path)
    store.add_run(record())
    arrays = {"a": np.zeros(1)}
    saved = store.save("run-00000000000000aa", "state", Save("x"), arrays, step=0)
    buffer = io.BytesIO()
    np.savez(buffer, a=np.array([Bomb()], dtype=object))
    assert b"touch" in buffer.getvalue()
    forged = msgspec.structs.replace(saved, sha256=hashlib.sha256(buffer.getvalue()).hexdigest())
    path = tmp_path / "runs" / saved.training_run / "state" / "x.npz"
    path.write_bytes(buffer.getvalue())
    with pytest.raises(Refused, match="cannot decode"):
        store.load(forged)
    assert not (tmp_path / "exploded").exists()


def test_ended_lifetimes_are_collected(tmp_path: Path) -> None:
    """collect() removes the files of ended checkpoints and nothing else."""
    store = CheckpointStore(tmp_path)
    store.add_run(record())
    arrays = {"a": np.zeros(1)}
    ended = store.save("run-00000000000000aa", "weights", Save("ended", ttl_seconds=1), arrays, step=0)
    kept = store.save("run-00000000000000aa", "weights", Save("kept", ttl_seconds=1000), arrays, step=0)
    past = msgspec.structs.replace(ended, expires_at=1.0)
    folder = tmp_path / "runs" / ended.training_run / "weights"
    (folder / "ended.json").write_bytes(msgspec.json.encode(past))
    again = CheckpointStore(tmp_path)
    with pytest.raises(Refused, match="no checkpoint"):
        again.find(ended.uri)
    assert again.collect() == 1
    assert sorted(path.name for path in folder.iterdir()) == ["kept.json", "kept.npz"]
    assert again.find(kept.uri) == kept
