"""Streams of a lone server beside those of one replica behind Ray's HAProxy, by turns: `python -m tests.ray.overhead`.

It prints the median time to the first token and the chunks a second, the medians of the rounds.
"""

import argparse
import os
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx

from tests.ray.cluster import PATIENCE, cluster
from tests.server.demo import ready

BODY = {"model": "demo", "temperature": 0, "max_tokens": 160, "ignore_eos": True, "stream": True}


def stream(url: str, prompt: str) -> tuple[float, int]:
    """Return the seconds to the first chunk, and the number of chunks."""
    began, first, chunks = time.perf_counter(), 0.0, 0
    with httpx.stream("POST", f"{url}/v1/completions", json=BODY | {"prompt": prompt}, timeout=PATIENCE) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                first = first or time.perf_counter() - began
                chunks += 1
    return first, chunks


def measure(url: str, concurrency: int, prompt: str) -> tuple[float, float]:
    """Return the median milliseconds to the first chunk, and the chunks a second of all streams together."""
    began = time.perf_counter()
    with ThreadPoolExecutor(concurrency) as pool:
        done = list(pool.map(lambda number: stream(url, f"{prompt} {number}"), range(2 * concurrency)))
    seconds = time.perf_counter() - began
    return 1000 * statistics.median(first for first, _ in done), sum(chunks for _, chunks in done) / seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    os.environ["OMP_NUM_THREADS"] = "1"  # a replica with one of Ray's cores has one thread
    with (
        TemporaryDirectory() as folder,
        ready("demo", "--verify", "full", "--max-num-seqs", "4") as lone,
        cluster(Path(folder) / "log") as ray,
    ):
        assert ray.deploy(num_replicas=1, num_cpus=1) == {"states": {"RUNNING": 1}}
        places = {"lone server": lone, "one replica": ray.url}
        for concurrency in (1, 4):
            found: dict[str, list[tuple[float, float]]] = {name: [] for name in places}
            for number in range(-1, rounds):
                for name, url in places.items():
                    one = measure(url, concurrency, f"Round {number}: count from one to nine.")
                    if number >= 0:
                        found[name].append(one)
            for name, pairs in found.items():
                first, chunks = (statistics.median(column) for column in zip(*pairs, strict=True))
                print(f"{concurrency} at once, {name}: first token {first:.1f} ms, {chunks:.1f} chunks/s", flush=True)


if __name__ == "__main__":
    main()
