"""Owns how the SDK is pointed at a service, the one place where hosted and embedded differ.

The SDK's configuration is global to the process and copied when a ServiceClient is made, so it is
set and used under one lock. For the embedded kind nothing leaves this machine: telemetry is off,
loopback bypasses proxies, and the SDK's files lie in the run directory, not in ~/.pytrio.
"""

import contextlib
import os
import sys
import threading
from pathlib import Path
from typing import NamedTuple

import pytrio

from core.config import EngineSettings
from core.errors import CredentialsMissing, ServiceRefused
from engine import launch
from engine.faults import LOGIN_ADVICE, translated
from engine.locks import Address
from engine.watch import Watch

SAMPLES_IN_FLIGHT = 16
"""Sampling requests that one SDK client sends an embedded engine at once. More cost the SDK more CPU
per request (its connection pool is scanned for each), fewer leave the engine's batches small."""
HOSTED_SAMPLES_IN_FLIGHT = 256
"""The same for the hosted service, whose answers take seconds: the caller bounds its concurrency."""
SAMPLES_QUEUED = 4096

CLOSING_PATIENCE = 1.0
"""Seconds for which the SDK retries a control call, and so for which it holds up the end of a
process whose engine is gone."""

LONGEST_CLOSING = 4.0
"""Seconds for which closing may wait for the service."""

LOOPBACK_HOSTS = ("127.0.0.1", "localhost")
_configuring = threading.Lock()


class Connection(NamedTuple):
    """An authenticated SDK client with what a session needs to know about its service."""

    service: pytrio.ServiceClient
    watch: Watch
    model: str
    """Base model, as the service names it."""
    fingerprint: str
    """Of the base model: SHA-256 of its files (embedded), or its name (hosted)."""
    tokenizer_folder: str
    """Local folder of the base model's tokenizer, or "" when the SDK must find it."""
    users: int | None
    """Descriptor that keeps the embedded engine alive; closed last."""


def open_embedded(settings: EngineSettings, run_dir: Path) -> Connection:
    """Join the run's engine, or start it, and authenticate."""
    stay_on_this_machine()
    address, users = launch.join(run_dir)
    folder = launch.engine_folder(run_dir)
    with contextlib.ExitStack() as undo:
        undo.callback(os.close, users)
        watch = Watch(folder, address)
        undo.callback(watch.close)
        _check_model(settings.base_model, address)
        with _configuring:
            point_at_engine(folder, address, settings.request_timeout)
            service = _open_service(watch)
        undo.pop_all()
    return Connection(service, watch, address.model, address.fingerprint, address.model_folder, users)


def _check_model(base_model: str, address: Address) -> None:
    if base_model not in ("", address.model, address.model_folder):
        raise ServiceRefused(
            f"the embedded engine has no model {base_model!r}: leave engine.base_model empty, or "
            f"use {address.model!r}"
        )


def point_at_engine(folder: Path, address: Address, patience: float) -> None:
    """Point the SDK at an embedded engine; home, address and key must be set in one call."""
    pytrio.configure_observability(enabled=False)
    pytrio.configure(
        home=str(folder / "home"),
        base_url=address.url,
        api_key=address.token,
        log_level="WARNING",
        control_retry_timeout_seconds=CLOSING_PATIENCE,
        training_retry_timeout_seconds=patience,
        sampling_retry_timeout_seconds=patience,
        retry_initial_delay_seconds=0.05,
        retry_max_delay_seconds=1.0,
        sampling_request_max_in_flight=SAMPLES_IN_FLIGHT,
        sampling_request_queue_capacity=SAMPLES_QUEUED,
    )


def open_hosted(settings: EngineSettings, run_dir: Path) -> Connection:
    """Authenticate at the hosted service with the user's profile or environment."""
    if not settings.base_model:
        raise ServiceRefused(
            "engine.base_model is empty: name a model of the hosted service, such as 'Qwen/Qwen3.5-4B'"
        )
    patience = settings.request_timeout
    watch = Watch(launch.engine_folder(run_dir), None)
    with _configuring:
        # An earlier embedded session in this process has pointed the SDK elsewhere.
        pytrio.configure_observability(enabled=True)
        pytrio.configure(
            home=str(Path.home()),
            env=os.environ.get("PYTRIO_ENV") or None,
            api_key=os.environ.get("PYTRIO_API_KEY") or None,
            base_url=os.environ.get("PYTRIO_BASE_URL") or None,
            control_retry_timeout_seconds=patience,
            training_retry_timeout_seconds=patience,
            sampling_retry_timeout_seconds=patience,
            actor_capacity_wait_timeout_seconds=patience,
            retry_initial_delay_seconds=1.0,
            retry_max_delay_seconds=30.0,
            sampling_request_max_in_flight=HOSTED_SAMPLES_IN_FLIGHT,
            sampling_request_queue_capacity=SAMPLES_QUEUED,
        )
        service = _open_service(watch)
    return Connection(service, watch, settings.base_model, settings.base_model, "", None)


def end_session(service: pytrio.ServiceClient) -> bool:
    """End the SDK's session at the service, in a few seconds at most: nobody must wait for a lost network.

    Returns False when this release of the SDK has no such door; then its session ends when the client and
    all that came from it are collected.
    """
    # The SDK has no public call for this. It ends a session when the last client is collected, or else when
    # the interpreter exits, and then asks again for as long as for any other request.
    runtime = getattr(service, "_runtime", None)
    shutdown = getattr(runtime, "shutdown", None)
    if runtime is None or not callable(shutdown):
        return False
    # Without the setting the SDK asks again for longer, and the wait below has an end all the same.
    with contextlib.suppress(AttributeError, TypeError, ValueError):
        runtime.configuration.control_retry_timeout_seconds = CLOSING_PATIENCE
    closing = threading.Thread(target=shutdown, name="engine-close", daemon=True)
    closing.start()
    closing.join(LONGEST_CLOSING)
    return True


def _open_service(watch: Watch) -> pytrio.ServiceClient:
    """Return an authenticated client; without a key this fails before anything is sent."""
    try:
        with translated("opening a session with PyTRIO"):
            return watch.run(pytrio.ServiceClient)
    except CredentialsMissing as exc:
        if "auth.missing_api_key" in str(exc):
            raise CredentialsMissing(f"no PyTRIO API key was found: {LOGIN_ADVICE}") from exc
        raise


def stay_on_this_machine() -> None:
    """Keep this process's SDK off the network and away from the user's files.

    Proxies must not see loopback traffic. The tokenizer is a local folder, so nothing may be
    fetched; and the SDK prefers modelscope for it, whose import takes seconds and writes under the
    home directory: with that import blocked it uses transformers, as it does when modelscope is
    not installed.
    """
    for name in ("NO_PROXY", "no_proxy"):
        hosts = [host for host in os.environ.get(name, "").split(",") if host]
        missing = [host for host in LOOPBACK_HOSTS if host not in hosts]
        os.environ[name] = ",".join(hosts + missing)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TRANSFORMERS_OFFLINE", "1")
    # Its advice to install PyTorch is not for us.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    sys.modules.setdefault("modelscope", None)  # type: ignore[arg-type]  # None blocks the import
