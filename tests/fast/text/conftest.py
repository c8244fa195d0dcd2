"""The tokenizer's folder is the one of the API's tests."""

from tests.fast.api.served import model_folder

__all__ = ["model_folder"]
