"""Settings of the test process that every suite needs."""

import signal


def pytest_configure() -> None:
    """Let Ctrl-C reach this process and its children.

    A shell that runs ``make test`` in its background has it ignored, and an ignored signal is
    inherited: tests that interrupt a push, or a command, would interrupt nothing.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
