"""A start that fails leaves nothing open."""

import socket
from pathlib import Path

import pytest

from app.api import server
from app.config.settings import Config


def test_with_its_port_taken_a_server_opens_no_other_socket(monkeypatch, capsys):
    monkeypatch.setattr(server, "Service", lambda *_: pytest.fail("its sockets of KV events were opened"))
    monkeypatch.setattr(server.log, "set_up", lambda *_: None)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert server.run(Config(port=taken.getsockname()[1]), Path(), None) == 1
    assert "cannot listen on" in capsys.readouterr().err
