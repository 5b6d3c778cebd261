"""Typed errors, whose messages may hold what a user gave."""

from __future__ import annotations

import pytest

from weft_rl.contract.errors import InvalidRequestError


@pytest.mark.parametrize("given", ["\ud800", "a\udcffb"])
def test_a_message_can_be_logged_and_sent_whatever_it_quotes(given: str) -> None:
    """File names may hold lone surrogates, which UTF-8 has no bytes for."""
    error = InvalidRequestError(f"{given} does not exist")
    assert "\\ud" in error.message
    assert str(error).encode().decode() == f"{error.message} [INVALID_REQUEST]"
    assert error.args == (error.message,)


def test_other_messages_stay_as_they_are() -> None:
    assert InvalidRequestError("größer als 10 µs").message == "größer als 10 µs"
