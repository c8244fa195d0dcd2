"""Fixtures of a server whose engine process is scripted by the test."""

from tests.fast.api.served import model_folder, patient_servers, server

__all__ = ["model_folder", "patient_servers", "server"]
