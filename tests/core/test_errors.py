"""Errors that cross rooms: what their message says, and to whom."""

from core.errors import EngineDied, EngineError, RolltapeError, ServiceBusy


def test_an_engines_error_keeps_its_advice_apart() -> None:
    """The whole message is for whoever sees the command end with it; what failed can be told without the advice."""
    error = EngineDied("the engine ended", "start the command again")
    assert str(error) == "the engine ended start the command again"
    assert error.said == "the engine ended"
    assert isinstance(error, EngineError)
    assert isinstance(error, RolltapeError)
    plain = ServiceBusy("no capacity")
    assert (str(plain), plain.said) == ("no capacity", "no capacity")
