"""Publisher of the prefix cache's changes, in the form of vLLM's KV events.

A message has three frames: topic, sequence number (8 bytes, big-endian, from 0 on), and a msgpack array
`[time, events, 0]` of one data-parallel rank. An event is a map with `type`. The sequence goes on over restarts of the
engine. A subscriber that has missed some asks the replay endpoint for them.
"""

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import msgspec
import zmq

from app.config.values import KvEventsConfig
from app.messages import CacheEvent

logger = logging.getLogger(__name__)

_END = (-1).to_bytes(8, "big", signed=True)
"""Sequence number after the last message of a replay."""
_MEDIUM = "GPU"
"""Medium of every device's memory: routers take a medium that they do not know for a slower one."""


class KvEventPublisher:
    """Sockets of one server's events."""

    def __init__(self, config: KvEventsConfig) -> None:
        self._config = config
        self._topic = config.topic.encode()
        self._sent: deque[tuple[int, bytes]] = deque(maxlen=config.buffer_steps if config.replay_endpoint else 0)
        self._next = 0
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None

    def bind(self) -> None:
        """Open the sockets, before events and replays. Raises zmq.ZMQError if an address cannot be bound."""
        self._context = zmq.Context()
        self._events = self._context.socket(zmq.PUB)
        self._replay = self._context.socket(zmq.ROUTER)
        self._events.set_hwm(self._config.hwm)
        self._replay.set_hwm(2 * (self._config.buffer_steps + 1))  # two whole replays for a client that does not read
        try:
            self._events.bind(self._config.endpoint)
            if self._config.replay_endpoint is not None:
                self._replay.bind(self._config.replay_endpoint)
        except zmq.ZMQError:
            self.close()
            raise

    def start(self) -> None:
        """Answer replays in the running event loop."""
        asyncio.get_running_loop().add_reader(self._replay.fileno(), self.answer_replays)

    def publish(self, events: Sequence[CacheEvent]) -> None:
        """Send the changes of one step. A subscriber that is too slow loses some, and may ask for a replay."""
        batch = [time.time(), [_vllms(event) for event in events], 0]
        payload = msgspec.msgpack.encode(batch)
        self._sent.append((self._next, payload))
        self._events.send_multipart((self._topic, self._next.to_bytes(8, "big"), payload), zmq.NOBLOCK)
        self._next += 1

    def answer_replays(self) -> None:
        """Send what is kept from the sequence number of each request on, and then the end."""
        with contextlib.suppress(zmq.Again):
            while True:
                frames = self._replay.recv_multipart(zmq.NOBLOCK)
                if len(frames) != 3 or len(frames[2]) != 8:
                    logger.warning("a request of %d frames for KV events has no sequence number", len(frames))
                    continue
                client, first = frames[0], int.from_bytes(frames[2], "big")
                for number, payload in self._sent:
                    if number >= first:
                        self._replay.send_multipart((client, b"", self._topic, number.to_bytes(8, "big"), payload))
                self._replay.send_multipart((client, b"", b"", _END, b""))

    async def stop(self, grace: float) -> None:
        """Answer no more replays, and close in a thread."""
        if self._context is not None:
            asyncio.get_running_loop().remove_reader(self._replay.fileno())
            await asyncio.to_thread(self.close, grace)

    def close(self, grace: float = 0.0) -> None:
        """Deliver what was sent, for `grace` seconds and a second at most, and free the addresses. Idempotent."""
        context, self._context = self._context, None
        if context is not None:
            context.destroy(linger=int(1000 * min(grace, 1.0)))


def _vllms(event: CacheEvent) -> dict[str, Any]:
    """Return vLLM's event of a change. `extra_keys` has an entry for each page, and that of the first has the salt."""
    if event.kind == "cleared":
        return {"type": "AllBlocksCleared"}
    pages = {"block_hashes": event.digests, "medium": _MEDIUM}
    if event.kind == "removed":
        return {"type": "BlockRemoved", **pages}
    stored = {"parent_block_hash": event.parent, "token_ids": event.token_ids, "block_size": event.page_size}
    salt = {"extra_keys": [[event.cache_salt], *([None] * (len(event.digests) - 1))]} if event.cache_salt else {}
    return {"type": "BlockStored", **pages, **stored, "lora_id": None, "lora_name": None, **salt}
