"""Owns every error that crosses a room. One base, one class per boundary; messages say what to do."""


class RolltapeError(Exception):
    """Raised for every failure that a user can act on; the CLI prints its message as one line."""


class ConfigError(RolltapeError):
    """Raised when a setting, preset or file named by the user is wrong."""


class DataError(RolltapeError):
    """Raised when a questions, corpus or import file cannot be used; names the line."""


class StoreError(RolltapeError):
    """Raised when the log cannot be opened, read or written."""


class Conflict(StoreError):
    """Raised when `expect` names a position that already holds other bytes, or one beyond the end."""


class OwnerLost(StoreError):
    """Raised when another worker has adopted the group that this one was writing."""


class GroupClosed(StoreError):
    """Raised on an append to a group that is closed, aborted or dropped."""


class LogDamaged(StoreError):
    """Raised when stored bytes fail their checksum, digest or chain; names the key."""


class LogForeign(StoreError):
    """Raised when a file at the log's place was not written by Rolltape."""


class LogTooNew(StoreError):
    """Raised when a newer release wrote the log."""


class LogFull(StoreError):
    """Raised when the map or the disk is full; the log stays readable."""


class LogBusy(StoreError):
    """Raised when another process holds a role that only one may have (the learner, a compaction)."""


class EngineError(RolltapeError):
    """Raised when the training or sampling service fails."""

    def __init__(self, said: str, advice: str = "") -> None:
        super().__init__(f"{said} {advice}".rstrip())
        self.said = said
        """What failed, without the advice to whoever sees the command end with it."""


class EngineDied(EngineError):
    """Raised within 2 s when the embedded engine's process ends under its clients."""


class EngineStopped(EngineDied):
    """Raised in its place when the engine ended in good order: by request, or its folder is gone."""


class CredentialsMissing(EngineError):
    """Raised at once when the hosted service is asked for without an API key."""


class ServiceBusy(EngineError):
    """Raised when the service has no capacity or limits the rate, after bounded retries."""


class ServiceRefused(EngineError):
    """Raised when the service refuses a request for good (balance, permission, bad input)."""


class WeightsGone(EngineError):
    """Raised when a weights or state URI no longer exists at the service."""


class TrainerBroken(EngineError):
    """Raised when a training run failed between its first gradient and its acknowledged update."""


class ToolError(RolltapeError):
    """Raised when a tool is misconfigured; faults at run time are typed results, never exceptions."""


class RewardError(RolltapeError):
    """Raised when a scorer returns something that is not a finite number."""


class EstimatorError(RolltapeError):
    """Raised when an advantage estimator is unknown or returns unusable numbers."""


class FoldError(RolltapeError):
    """Raised when events contradict each other (an orphan node, unequal lengths, two answers)."""


class CodeNotAllowed(RolltapeError):
    """Raised when a log names user code (`module:function`) that the user has not allowed by name."""


class ReplayError(RolltapeError):
    """Raised when a step cannot be re-derived (missing step, missing group, code not allowed)."""
