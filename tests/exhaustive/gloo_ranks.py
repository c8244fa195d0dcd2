"""Engines whose ranks are processes over Gloo: `python -m tests.exhaustive.gloo_ranks`, started by `run_on_ranks`."""

from tests.exhaustive.rank_processes import start
from tests.fast.engine.lossless import run_engine

PROGRAM = "tests.exhaustive.gloo_ranks"

if __name__ == "__main__":
    start(PROGRAM, lambda engine, requests: run_engine(engine, requests, lambda _: None))
