"""An index that is rebuilt from the published KV events has the pages that the pool has, and no others."""

import asyncio
import hashlib
import itertools
import threading
from array import array
from random import Random
from typing import Any

import msgspec
import pytest
import zmq

from app.config.values import KvEventsConfig
from app.engine.schedule.cache_events import CacheEvents
from app.engine_client.kv_events import KvEventPublisher
from tests.fast.schedule.scheduler_harness import VOCAB, Harness

PAGE = 4
END = (1 << 64) - 1


class Index:
    """Index of a router: pages by their hashes. It knows msgpack and vLLM's names of the fields alone."""

    def __init__(self) -> None:
        self.pages: dict[bytes, tuple[int, ...]] = {}
        self.next = 0
        self.kinds: set[str] = set()
        self.longest = 0

    def take(self, topic: bytes, number: bytes, payload: bytes) -> None:
        assert (topic, int.from_bytes(number, "big")) == (b"kv@here", self.next)
        self.next += 1
        _, events, rank = msgspec.msgpack.decode(payload)
        assert rank == 0
        for event in events:
            self.kinds.add(event["type"])
            getattr(self, event["type"])(event)

    def BlockStored(self, event: dict[str, Any]) -> None:
        must = {"type", "block_hashes", "parent_block_hash", "token_ids", "block_size"}
        must |= {"lora_id", "lora_name", "medium"}
        assert must <= event.keys() <= must | {"extra_keys"}
        assert (event["block_size"], event["medium"], event["lora_id"]) == (PAGE, "GPU", None)
        hashes, tokens, parent = event["block_hashes"], event["token_ids"], event["parent_block_hash"]
        assert len(tokens) == PAGE * len(hashes)
        assert len(event.get("extra_keys", hashes)) == len(hashes), "a router pairs them"
        salt = event["extra_keys"][0][0] if "extra_keys" in event else ""
        assert not (salt and parent), "only the first page of a prompt has the salt"
        self.longest = max(self.longest, len(hashes))
        digest = parent or hashlib.sha256(salt.encode()).digest()
        for number, name in enumerate(hashes):
            own = tokens[number * PAGE : (number + 1) * PAGE]
            digest = hashlib.sha256(digest + array("i", own).tobytes()).digest()
            assert name == digest, "tokens, parent and salt are not those of the page"
            assert name not in self.pages
            self.pages[name] = tuple(own)

    def BlockRemoved(self, event: dict[str, Any]) -> None:
        assert event.keys() == {"type", "block_hashes", "medium"}
        for name in event["block_hashes"]:
            del self.pages[name]

    def AllBlocksCleared(self, event: dict[str, Any]) -> None:
        assert event.keys() == {"type"}
        self.pages.clear()


@pytest.fixture
def sockets(tmp_path):
    """Publisher with a subscriber, and a client of its replays."""
    endpoint, replay = f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay"
    options = {"enable_kv_cache_events": True, "endpoint": endpoint, "replay_endpoint": replay, "topic": "kv@here"}
    publisher = KvEventPublisher(KvEventsConfig(**options, buffer_steps=50))
    publisher.bind()
    with zmq.Context() as context, context.socket(zmq.SUB) as subscriber, context.socket(zmq.DEALER) as client:
        for socket in (subscriber, client):
            socket.linger, socket.rcvtimeo = 0, 600_000
            socket.set_hwm(0)
        subscriber.subscribe(b"kv@here")
        subscriber.connect(endpoint)
        client.connect(replay)
        await_subscription(publisher, subscriber)
        yield publisher, subscriber, client
        publisher.close()


def await_subscription(publisher: KvEventPublisher, subscriber: "zmq.Socket[bytes]") -> None:
    """Send numbers until one arrives, and receive all that are still under way. What was sent before is lost."""
    for number in itertools.count():
        publisher._events.send_multipart((b"kv@here", b"%d" % number))
        if subscriber.poll(20):
            break
    while subscriber.recv_multipart()[1] != b"%d" % number:
        pass


def work(harness: Harness, random: Random, publisher: KvEventPublisher, steps: int) -> int:
    """Run requests of a few stems and salts, with aborts and flushes, and publish after each step. Return how often."""
    num_published = 0
    stems = [[random.randrange(VOCAB) for _ in range(16)] for _ in range(4)]
    for _ in range(steps):
        if len(harness.live) < 6:
            begins = random.choice(stems)[: random.randrange(17)]
            harness.add(
                random.randrange(1, 22), random.randrange(1, 9), begins=begins, salt=random.choice(["", "", "s"])
            )
        if random.random() < 0.05:
            harness.abort(random.choice(list(harness.live)))
        if random.random() < 0.02:
            harness.flush()
        if harness.scheduler.has_work:
            harness.step(lambda rows: random.randrange(rows.num_drafts + 1))
        if events := harness.scheduler.take_cache_events():
            publisher.publish(events)
            num_published += 1
    return num_published


def test_the_rebuilt_index_is_the_pools_after_a_random_load(sockets):
    publisher, subscriber, _ = sockets
    harness = Harness(page_size=PAGE, spare_pages=6, spare_rows=8, prefix_caching=True)
    harness.scheduler.events = CacheEvents()
    index, num_published = Index(), 0
    for seed in range(3):
        num_published += work(harness, Random(seed), publisher, 40)
        while index.next < num_published:
            index.take(*subscriber.recv_multipart())
        assert index.pages.keys() == harness.pool.cached.keys()
    assert harness.pages_evicted and harness.pages_found and index.longest > 1
    assert index.kinds == {"BlockStored", "BlockRemoved", "AllBlocksCleared"}


def test_a_replay_begins_where_it_was_asked_to_and_has_what_is_kept(sockets):
    publisher, _, client = sockets
    for _ in range(60):
        publisher.publish([])
    for asked, first in ((55, 55), (3, 10), (90, None)):
        client.send_multipart((b"", asked.to_bytes(8, "big")))
        while not client.poll(20):
            publisher.answer_replays()
        wanted = [END] if first is None else [*range(first, 60), END]
        for number in wanted:
            frames = client.recv_multipart()
            topic = b"" if number == END else b"kv@here"
            assert frames[:3] == [b"", topic, number.to_bytes(8, "big")]
            assert (frames[3] == b"") == (number == END)


def test_without_an_endpoint_for_replays_none_is_kept(tmp_path):
    publisher = KvEventPublisher(KvEventsConfig(enable_kv_cache_events=True, endpoint=f"ipc://{tmp_path}/events"))
    publisher.bind()
    publisher.publish([])
    assert not publisher._sent
    publisher.close()


def test_the_event_loop_goes_on_while_the_last_events_are_delivered(tmp_path, monkeypatch):
    publisher = KvEventPublisher(KvEventsConfig(enable_kv_cache_events=True, endpoint=f"ipc://{tmp_path}/events"))
    publisher.bind()
    close, delivered = publisher.close, threading.Event()

    def close_late(grace: float) -> None:
        assert delivered.wait(600), "the loop was blocked"
        close(grace)

    async def stop() -> None:
        publisher.start()
        stopping = asyncio.create_task(publisher.stop(1.0))
        await asyncio.sleep(0.01)
        delivered.set()
        await stopping

    monkeypatch.setattr(publisher, "close", close_late)
    asyncio.run(stop())


def test_a_publisher_whose_address_is_taken_or_that_never_began_can_be_stopped(tmp_path):
    config = KvEventsConfig(enable_kv_cache_events=True, endpoint=f"ipc://{tmp_path}/none/events")
    publisher = KvEventPublisher(config)
    asyncio.run(publisher.stop(1.0))
    with pytest.raises(zmq.ZMQError):
        publisher.bind()
    asyncio.run(publisher.stop(1.0))


def test_a_request_for_a_replay_that_cannot_be_read_is_told_and_the_next_is_answered(sockets, caplog):
    publisher, _, client = sockets
    client.send_multipart((b"", b"short"))
    client.send_multipart((b"", bytes(8)))
    for _ in range(6_000):
        publisher.answer_replays()
        if client.poll(100):
            break
    assert client.recv_multipart() == [b"", b"", END.to_bytes(8, "big"), b""]
    assert "no sequence number" in caplog.text


def test_without_events_the_pool_collects_none():
    harness = Harness(page_size=PAGE, prefix_caching=True)
    harness.add(12, 4)
    harness.drain()
    assert harness.pool.cached and harness.scheduler.events is None and harness.scheduler.take_cache_events() == []
