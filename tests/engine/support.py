"""Helpers of the engine's tests: the wire without the SDK, child programs, and waiting with an end."""

import contextlib
import http.client
import json
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Self
from urllib.parse import urlsplit

import msgspec

from engine.locks import Address

PROJECT = Path(__file__).resolve().parents[2]
ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"


def until(condition: Callable[[], bool], what: str, seconds: float = 20.0) -> float:
    """Wait for a condition and return how long it took; fails the test after `seconds`."""
    started = time.monotonic()
    while not condition():
        assert time.monotonic() - started < seconds, f"{what} did not happen within {seconds} s"
        time.sleep(0.01)
    return time.monotonic() - started


class Answer(NamedTuple):
    """An HTTP answer, decoded by its content type."""

    status: int
    body: Any


class Wire:
    """A client of the engine that can say what the SDK never would."""

    def __init__(self, address: Address, token: str | None = None) -> None:
        parts = urlsplit(address.url)
        self.connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=60)
        self.token = address.token if token is None else token

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.connection.close()

    def send(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        headers: dict[str, str] | None = None,
    ) -> Answer:
        """Return the answer to one request."""
        sent = {"Authorization": f"Bearer {self.token}"} | (headers or {})
        try:
            self.connection.request(method, path, body=body, headers=sent)
            response = self.connection.getresponse()
            data = response.read()
        except (ConnectionError, http.client.HTTPException):
            self.connection.close()
            raise
        kind = response.getheader("content-type", "")
        if "msgpack" in kind:
            return Answer(response.status, msgspec.msgpack.decode(data))
        return Answer(response.status, json.loads(data) if "json" in kind else data)

    def json(self, method: str, path: str, body: object) -> Answer:
        """Send a JSON body."""
        return self.send(method, path, msgspec.json.encode(body))

    def open_run(self, **fields: object) -> str:
        """Return a new training run's id; the session is new as well."""
        session = self.json("POST", "/api/openapi/v1/service-sessions", {"sdk_version": "test"})
        cuid = session.body["service_session_cuid"]
        asked = {
            "base_model": "rolltape/tiny",
            "lora_rank": 4,
            "train_mlp": True,
            "train_attn": True,
            "train_unembed": True,
        }
        path = f"/api/openapi/v1/service-sessions/{cuid}/training-runs"
        answer = self.json("POST", path, asked | fields)
        assert answer.status == 200, answer
        return str(answer.body["training_run_cuid"])


class Events:
    """The event sequence of one training run."""

    def __init__(self, wire: Wire, training_run: str) -> None:
        self.wire = wire
        self.training_run = training_run
        self.index = 1
        self.step = 0

    def envelope(self, kind: str, payload: object, **changes: object) -> dict[str, object]:
        """Return the next event."""
        metadata = {
            "index": self.index,
            "step": self.step,
            "timestamp": 1,
            "sdk": "test",
            "sdk_version": "0",
            "run_id": self.training_run,
        }
        return {
            "version": 1,
            "event_id": "event_" + "".join(secrets.choice(ALPHABET) for _ in range(12)),
            "type": kind,
            "metadata": metadata,
            "payload": payload,
        } | changes

    def post(self, kind: str, payload: object, **changes: object) -> Answer:
        """Post the next event and wait for its end; a refused one does not count."""
        envelope = self.envelope(kind, payload, **changes)
        answer = self.wire.send("POST", "/v1/events", msgspec.msgpack.encode(envelope))
        if answer.status != 200:
            return answer
        self.index += 1
        while answer.body["status"] == "running":
            path = f"/v1/events/{envelope['event_id']}"
            answer = self.wire.send("GET", path, headers={"Prefer": "wait=20"})
        return answer

    def restart(self) -> None:
        """Go on with a new training run."""
        self.training_run, self.index, self.step = self.wire.open_run(), 1, 0
        assert self.init().body["status"] == "succeeded"

    def init(self) -> Answer:
        """Give the run its weights."""
        lora = {"rank": 4, "train_mlp": True, "train_attn": True, "train_unembed": True, "seed": 1}
        return self.post("trainer.init_run", {"base_model": "rolltape/tiny", "lora_config": lora})


def forward_payload(length: int = 8, count: int = 1, **changes: object) -> dict[str, object]:
    """Return a legal forward_backward payload."""
    datum = {
        "model_input": {"chunks": [{"type": "encoded_text", "tokens": [5] * length}]},
        "target_ids": [6] * length,
        "logprobs": [-1.0] * length,
        "advantages": [1.0] * length,
    }
    total = length * count
    return {
        "data": [datum] * count,
        "auto_shift": False,
        "loss": {"type": "importance_sampling", "config": {}},
        "gradient_accumulation": {
            "total_samples": count,
            "total_active_tokens": total,
            "total_advantage_tokens": total,
        },
    } | changes


def start_program(source: str, *arguments: str, **environment: str) -> "subprocess.Popen[str]":
    """Start a Python program in a process of its own, its output piped."""
    env = os.environ | {"PYTHONPATH": str(PROJECT)} | environment
    return subprocess.Popen(
        [sys.executable, "-c", source, *arguments],
        env=env,
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def finish(program: "subprocess.Popen[str]", seconds: float = 60.0) -> str:
    """Return what a program printed; fails the test when it fails or takes too long."""
    try:
        out, err = program.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        program.kill()
        program.communicate()
        raise
    assert program.returncode == 0, err
    return out


def end(program: "subprocess.Popen[str]") -> None:
    """Kill a program and close its pipes."""
    with contextlib.suppress(ProcessLookupError):
        program.kill()
    program.communicate()
