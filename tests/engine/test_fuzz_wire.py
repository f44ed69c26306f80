"""Whatever arrives on the wire, the answer is a success, a 4xx or a failed event; never a 5xx or a hang."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine import launch
from tests.engine.support import Events, Wire, forward_payload

# Threads of the SDK, left by other tests of the process, draw their retry jitter from `random`.
pytestmark = pytest.mark.filterwarnings("ignore:Do not use the `random` module")

API = "/api/openapi/v1"
FUZZ = settings(
    max_examples=120,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)

HUGE = st.sampled_from([2**31, 2**63 - 1, 2**64 - 1, -(2**63), -1, 0])
NUMBERS = st.one_of(st.integers(-(2**63), 2**64 - 1), HUGE, st.floats(allow_nan=True))
SCALARS = st.one_of(st.none(), st.booleans(), NUMBERS, st.text(max_size=20), st.binary(max_size=20))
TREES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=5), st.dictionaries(st.text(max_size=12), inner, max_size=5)
    ),
    max_leaves=20,
)
KINDS = ("init_run", "forward", "forward_backward", "optimize_step", "save_state", "save_weights")
ADAM = dict.fromkeys(("learning_rate", "beta1", "beta2", "eps", "weight_decay", "grad_clip_norm"), 0.1)
LORA = {"rank": 4, "train_mlp": True, "train_attn": True, "train_unembed": True, "seed": 1}
LEGAL: dict[str, dict[str, Any]] = {
    "init_run": {"base_model": "rolltape/tiny", "lora_config": LORA, "load_optimizer": False},
    "forward": forward_payload(4),
    "forward_backward": forward_payload(4),
    "optimize_step": {"adam_params": ADAM},
    "save_state": {"name": "s", "ttl_seconds": 60, "overwrite": True},
    "save_weights": {"name": "w", "ttl_seconds": 60, "overwrite": True, "visibility": "TEMPORARY"},
}
SAMPLE: dict[str, Any] = {
    "request_id": "r",
    "prompt": {"chunks": [{"type": "encoded_text", "tokens": [5, 6, 7]}]},
    "sampling_params": {
        "max_tokens": 2,
        "seed": 1,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": -1,
        "stop": ["x"],
        "stop_token_ids": [3],
    },
    "num_samples": 1,
    "topk_prompt_logprobs": 1,
}


@pytest.fixture(scope="module")
def wire(shared_run: Path) -> Iterator[Wire]:
    """Open a raw client of an engine that must survive the whole module."""
    joined = launch.join(shared_run)
    with Wire(joined.address) as client:
        client.send("GET", "/engine/status")
        yield client
        status = client.send("GET", "/engine/status")
        assert status.body["instance"] == joined.address.instance
        log = (launch.engine_folder(shared_run) / "engine.log").read_text()
        assert "Traceback" not in log, log[-3000:]
    os.close(joined.users)


@pytest.fixture(scope="module")
def events(wire: Wire) -> Events:
    """Open a training run that takes whatever comes."""
    sequence = Events(wire, wire.open_run())
    assert sequence.init().body["status"] == "succeeded"
    return sequence


@pytest.fixture(scope="module")
def sampling(wire: Wire) -> str:
    """Return the path of a sampling run."""
    session = wire.json("POST", f"{API}/service-sessions", {"sdk_version": "t"}).body
    path = f"{API}/service-sessions/{session['service_session_cuid']}/sampling-runs"
    run = wire.json("POST", path, {"base_model": "rolltape/tiny"}).body
    return f"/v1/sampling-runs/{run['sampling_run_cuid']}/sample"


@st.composite
def spoiled(draw: st.DrawFn, legal: dict[str, Any]) -> Any:
    """Return a legal message with one to three of its parts replaced by anything, or removed."""
    message = msgspec.msgpack.decode(msgspec.msgpack.encode(legal))
    for _ in range(draw(st.integers(1, 3))):
        places = list(_places(message))
        if not places:
            break
        container, key = draw(st.sampled_from(places))
        if isinstance(container, dict) and draw(st.integers(0, 4)) == 0:
            del container[key]
        else:
            container[key] = draw(st.one_of(TREES, st.lists(NUMBERS, max_size=8)))
    return message


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    children = value.items() if isinstance(value, dict) else enumerate(value)
    for key, child in list(children):
        yield value, key
        if isinstance(child, dict | list):
            yield from _places(child)


def check(status: int) -> None:
    """Fail on anything but success or a client error; a fault of ours would be `engine_fault`."""
    assert status == 200 or 400 <= status < 500, status


@FUZZ
@given(body=st.one_of(st.binary(max_size=200), TREES.map(msgspec.msgpack.encode)))
def test_any_bytes_as_an_event(wire: Wire, body: bytes) -> None:
    """Bytes that are no event are refused."""
    answer = wire.send("POST", "/v1/events", body)
    assert 400 <= answer.status < 500
    assert answer.body["code"] != "engine_fault"


@FUZZ
@given(data=st.data(), kind=st.sampled_from(KINDS))
def test_spoiled_payloads(events: Events, data: st.DataObject, kind: str) -> None:
    """A payload with wrong parts is executed, refused or fails, and the run still works after it."""
    answer = events.post(f"trainer.{kind}", data.draw(spoiled(LEGAL[kind])))
    check(answer.status)
    if answer.status == 200 and answer.body["status"] == "failed":
        assert answer.body["error"]["code"] != "engine_fault", answer.body
    after = events.post("trainer.forward", forward_payload(3))
    if after.body["status"] == "failed":
        # An absurd learning rate is the caller's right; the weights it leads to can then be useless.
        assert (kind, after.body["error"]["code"]) == ("optimize_step", "invalid_input"), after.body
        events.restart()


@FUZZ
@given(data=st.data())
def test_spoiled_envelopes(events: Events, data: st.DataObject) -> None:
    """An envelope with wrong parts is refused or accepted, and the sequence goes on either way."""
    envelope = data.draw(spoiled(events.envelope("trainer.forward", forward_payload(2))))
    answer = events.wire.send("POST", "/v1/events", msgspec.msgpack.encode(envelope))
    check(answer.status)
    if answer.status == 200:
        events.index += 1
    else:
        assert answer.body["code"] != "engine_fault"
    assert events.post("trainer.forward", forward_payload(3)).body["status"] == "succeeded"


@FUZZ
@given(data=st.data())
def test_spoiled_sampling_requests(wire: Wire, sampling: str, data: st.DataObject) -> None:
    """A sampling request with wrong parts is answered or refused."""
    request = data.draw(spoiled(SAMPLE))
    body = json_bytes(request)
    answer = wire.send("POST", sampling, body)
    check(answer.status)
    assert answer.status == 200 or answer.body["code"] != "engine_fault", answer.body


def json_bytes(value: Any) -> bytes:
    """Return JSON in which NaN and binary stand as the SDK's encoder could never write them."""
    return json.dumps(value, default=repr).encode()


@FUZZ
@given(
    method=st.sampled_from(["GET", "POST", "PATCH", "DELETE"]),
    path=st.sampled_from(
        [
            "/service-sessions",
            "/service-sessions/{}/training-runs",
            "/service-sessions/{}/sampling-runs",
            "/service-sessions/{}/training-runs/{}",
            "/service-sessions/{}/close",
            "/training-runs",
            "/training-runs/{}",
            "/training-runs/{}/checkpoints",
            "/training-runs/by-checkpoint-uri",
            "/sampling-runs/{}",
            "/checkpoints",
            "/checkpoints/{}",
            "/checkpoints/{}/download-url",
        ]
    ),
    name=st.text(st.characters(codec="ascii", categories=["L", "N", "P"]), min_size=1, max_size=30),
    query=st.dictionaries(st.sampled_from(["limit", "offset", "checkpoint_uri"]), st.text(max_size=9)),
    body=st.one_of(TREES.map(json_bytes), st.binary(max_size=50)),
)
def test_control_calls_with_anything(  # one argument per part of a request
    wire: Wire, method: str, path: str, name: str, query: dict[str, str], body: bytes
) -> None:
    """Every control path answers or refuses any name, query and body."""
    target = API + path.replace("{}", quote(name, safe="")) + "?" + urlencode(query)
    answer = wire.send(method, target, body if method != "GET" else None)
    check(answer.status)
    assert answer.status == 200 or answer.body["code"] != "engine_fault", answer.body


@pytest.mark.parametrize("depth", [200, 100_000])
def test_deep_nesting(wire: Wire, events: Events, sampling: str, depth: int) -> None:
    """Nesting without end is refused, as an event, as a payload and as JSON."""
    deep = b"\x91" * depth + b"\x90"
    assert wire.send("POST", "/v1/events", deep).status == 400
    answer = events.post("trainer.forward", msgspec.Raw(deep))
    assert answer.status == 400 or answer.body["status"] == "failed"
    assert wire.send("POST", sampling, b"[" * depth).status == 400
    assert wire.send("POST", sampling, b'{"request_id":' * depth).status == 400


@pytest.mark.parametrize(
    "value", [float("nan"), float("inf"), 1e39, -1e308, 3.4e38, 1e30], ids=lambda v: f"{v:g}"
)
@pytest.mark.parametrize("loss", ["importance_sampling", "ppo", "cispo", "dro"])
def test_numbers_beyond_reason(wire: Wire, value: float, loss: str) -> None:
    """Advantages and logprobs out of range fail, and a step after them has finite weights."""
    sequence = Events(wire, wire.open_run())
    sequence.init()
    for field in ("advantages", "logprobs"):
        payload = forward_payload(3, loss={"type": loss, "config": {}})
        payload["data"] = [payload["data"][0] | {field: [value] * 3}]  # type: ignore[index]
        check(sequence.post("trainer.forward_backward", payload).status)
    check(sequence.post("trainer.optimize_step", {"adam_params": ADAM}).status)
    after = sequence.post("trainer.forward", forward_payload(3))
    assert after.body["status"] == "succeeded", after.body


def test_diverged_weights_fail_in_words(wire: Wire) -> None:
    """A learning rate beyond reason leads to weights that can be saved but neither trained nor sampled."""
    sequence = Events(wire, wire.open_run())
    sequence.init()
    sequence.post("trainer.forward_backward", forward_payload(3))
    sequence.post("trainer.optimize_step", {"adam_params": ADAM | {"learning_rate": 1e20}})
    forward = sequence.post("trainer.forward", forward_payload(3))
    assert "not finite" in forward.body["error"]["message"]
    saved = sequence.post("trainer.save_weights", {"name": "w"}).body["result"]["checkpoint"]
    session = wire.json("POST", f"{API}/service-sessions", {"sdk_version": "t"}).body
    path = f"{API}/service-sessions/{session['service_session_cuid']}/sampling-runs"
    asked = {"base_model": "rolltape/tiny", "source_checkpoint_uri": saved["uri"]}
    run = wire.json("POST", path, asked).body
    answer = wire.json("POST", f"/v1/sampling-runs/{run['sampling_run_cuid']}/sample", SAMPLE)
    assert (answer.status, answer.body["code"]) == (400, "invalid_input")
    assert "diverged" in answer.body["message"]
    refused = sequence.post("trainer.optimize_step", {"adam_params": ADAM | {"learning_rate": 1e39}})
    assert "nothing was updated" in refused.body["error"]["message"]
