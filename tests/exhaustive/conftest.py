"""Fixtures of the fast tests, for exhaustive tests."""

from tests.fast.api.served import background, model_folder, own_server, patient_servers, server, shared_server

__all__ = ["background", "model_folder", "own_server", "patient_servers", "server", "shared_server"]
