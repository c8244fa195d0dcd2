"""Fixtures of the fast tests, for exhaustive tests."""

from tests.fast.api.served import background, model_folder, own_server, patient_servers, server, shared_server
from tests.fast.engine.kept import kept

__all__ = ["background", "kept", "model_folder", "own_server", "patient_servers", "server", "shared_server"]
