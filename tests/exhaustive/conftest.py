"""Fixtures of the fast tests, for those that go through all there is."""

from tests.fast.api.served import background, model_folder, own_server, patient_servers, server, shared_server
from tests.fast.engine.kept import kept

__all__ = ["background", "kept", "model_folder", "own_server", "patient_servers", "server", "shared_server"]
