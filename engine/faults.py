"""Owns the translation of the SDK's errors into ours: what failed, in plain words, and what to do."""

import contextlib
from collections.abc import Iterator

from pytrio import PyTrioError

from core.errors import (
    CredentialsMissing,
    EngineError,
    ServiceBusy,
    ServiceRefused,
    TrainerBroken,
    WeightsGone,
)

LOGIN_ADVICE = (
    "run `trio login`, or set PYTRIO_API_KEY to a key from the PyTRIO console "
    "(or use the embedded engine: --set engine.kind=embedded)"
)

KEY_CODES = frozenset(
    {"unauthorized", "api_key_expired", "api_key_revoked", "api_key_disabled"}
    | {"auth.missing_api_key", "auth.failed", "auth.login_failed"}
)
BUSY_CODES = frozenset(
    {"too_many_requests", "actor_capacity_exceeded", "no_available_actor", "service_unavailable"}
    | {"auth_service_unavailable", "actor_disabled", "runner_disabled", "internal_error"}
    | {"database_error", "control.request_failed", "actor.request_failed"}
)
BROKEN_CODES = frozenset(
    {"training.run_broken", "training.run_closed", "run_not_found", "training_run_not_found"}
    | {"event_out_of_order", "event_not_found", "event.polling_failed", "run_not_initialized"}
)
GONE_CODES = frozenset(
    {"checkpoint_not_found", "checkpoint_expired", "checkpoint_deleted", "checkpoint_damaged"}
)
GONE_STATUS = frozenset({404, 410})
PAYMENT_CODES = frozenset({"billing_insufficient_balance"})
PAYMENT_ADVICE = "the balance is used up: add credit, then start again; nothing is lost."
PAYMENT_REQUIRED = 402
UNAUTHORIZED = 401
BUSY_STATUS = frozenset({408, 429, 500, 502, 503, 504})
CLIENT_ERRORS = range(400, 500)


def translate(exc: Exception, what: str, *, uri: str = "") -> EngineError:
    """Return our error for an SDK error raised while doing `what` (with the checkpoint `uri`)."""
    if not isinstance(exc, PyTrioError):
        # The SDK raises bare ValueErrors for input that it does not accept.
        kind = ServiceRefused if isinstance(exc, ValueError | TypeError) else EngineError
        return kind(f"{what} failed: {exc}")
    code, status = exc.code, exc.status_code
    said = f"{what} failed: {exc.message.rstrip('.')} ({code})."
    gone = bool(uri) and status in GONE_STATUS and "model" not in code
    refused = code.startswith("validation.") or status in CLIENT_ERRORS or exc.source == "event"
    for applies, error, advice in (
        (code in KEY_CODES or status == UNAUTHORIZED, CredentialsMissing, LOGIN_ADVICE),
        (code in GONE_CODES or gone, WeightsGone, f"{uri!r} is gone: publish or restore another"),
        (code in BROKEN_CODES, TrainerBroken, "start again: the newest checkpoint is restored."),
        (code in PAYMENT_CODES or status == PAYMENT_REQUIRED, ServiceRefused, PAYMENT_ADVICE),
        (code in BUSY_CODES or status in BUSY_STATUS, ServiceBusy, "start again later; nothing is lost."),
        (refused, ServiceRefused, exc.hint),
    ):
        if applies:
            return error(said, advice[:1].upper() + advice[1:])
    return EngineError(said, exc.hint)


@contextlib.contextmanager
def translated(what: str, *, uri: str = "") -> Iterator[None]:
    """Raise our error for any that the SDK raises inside."""
    try:
        yield
    except (PyTrioError, ValueError, TypeError, RuntimeError) as exc:
        raise translate(exc, what, uri=uri) from exc
