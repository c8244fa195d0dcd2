"""Fixtures of a server whose engine process is scripted by the test."""

from tests.fast.api.served import background, model_folder, own_server, patient_servers, server, shared_server
from tests.fast.api.templates import start, started

__all__ = ["background", "model_folder", "own_server", "patient_servers", "server", "shared_server", "start", "started"]
