"""Another account on the machine, which can take any port and list the processes, cannot come between a user and their server."""

import socket

import pytest

from samewise.runner.commands.ui import _command, _listening


@pytest.mark.parametrize("option", [socket.SO_REUSEADDR, socket.SO_REUSEPORT])
def test_nobody_can_take_the_port_of_the_ui_while_its_server_starts(option: int) -> None:
    """The server inherits the socket: a stranger's, bound in the meantime, would be announced and opened as the user's own MLflow."""
    with _listening(None) as listening, socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, option, 1)
        for address in ("127.0.0.1", "0.0.0.0"):
            with pytest.raises(OSError, match="in use"):
                other.bind((address, listening.getsockname()[1]))


def test_the_ui_server_is_started_on_the_socket_that_it_inherits() -> None:
    """uvicorn's --fd goes before host and port; `tests/runner/test_tracking_commands.py` sends requests to the server that this starts."""
    assert "--fd 0 " in _command("sqlite:///x.db", 5000)[_command("sqlite:///x.db", 5000).index("--uvicorn-opts") + 1]
