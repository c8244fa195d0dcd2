"""Fixtures of the clients' tests: complete environments, and a server whose engine writes what a model would."""

import os

import pytest

from tests.clients.environments import are_complete
from tests.clients.scripted import shared_server, url
from tests.fast.api.served import model_folder, patient_servers, server

__all__ = ["environments", "model_folder", "patient_servers", "server", "shared_server", "url"]


@pytest.fixture(scope="session")
def environments() -> None:
    """Skip a test that needs the clients where they are not installed. With CI set that is a failure."""
    if are_complete():
        return
    if os.environ.get("CI"):
        pytest.fail("the clients are not installed: `make test-clients`")
    pytest.skip("the clients are not installed: `make test-clients`")
