"""Server on a real socket, whose engine process is scripted by the test."""

import asyncio
import contextlib
import inspect
import itertools
import json
import shutil
import socket
import ssl
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from queue import Queue
from random import Random
from typing import Any

import httpx
import msgspec
import pytest
import tokenizers
import uvicorn
import uvloop
import zmq
from openai import OpenAI
from tokenizers import decoders, models, pre_tokenizers, trainers

from app.api import body, connection
from app.api.server import create_app
from app.api.services import Services
from app.config.settings import Config
from app.engine_client.admission import Admission
from app.engine_client.client import EngineClient
from app.engine_client.request_stream import RequestStream
from app.engine_client.supervisor import EngineState, Supervisor
from app.messages import SpecStep, TokenDelta
from app.metrics import Metrics
from app.text.tokenizer import Tokenizer

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
CORPUS = ["the quick brown fox jumps over the lazy dog", "hello world, how are you today?", "stop here and there"] * 4
INFO = {
    "target": "tiny",
    "draft": "tiny-draft",
    "device": "cpu",
    "dtype": "float32",
    "block_size": 16,
    "taps": [1, 3],
    "page_size": 16,
    "num_pages": 100,
    "max_model_len": 256,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 512,
    "vocab_size": 512,
    "state_bytes": 0,
    "state_cache_bytes": 0,
    "num_state_checkpoints": 0,
    "quantised_bytes": 0,
    "tensor_parallel_size": 1,
    "draft_config": {"layers": "2", "masks": "1 causal, window 2048; 1 bidirectional"},
}
PATIENCE = 300.0
"""Time limit in seconds for every event that must happen, generous because the machine may be slow."""
NO_TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""Context without certificates, which each new client would read again for 50 ms."""


class Script:
    """Test's side of the scripted engine: orders go in, and the events that the engine sees come out in order."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._context = zmq.Context()
        self._orders = self._context.socket(zmq.PUSH)
        self.events = self._context.socket(zmq.PULL)
        for name, bound in (("orders", self._orders), ("seen", self.events)):
            bound.set_hwm(0)  # The engine never waits for the test.
            bound.linger = 0
            bound.rcvtimeo = bound.sndtimeo = int(1000 * PATIENCE)
            bound.bind(f"ipc://{folder}/{name}")
        script = Path(__file__).with_name("scripted_engine.py")
        self.command = (sys.executable, str(script), f"ipc://{folder}/orders", f"ipc://{folder}/seen")
        self.later: list[dict[str, Any]] = []
        self.info = INFO

    def order(self, do: str, **more: Any) -> None:
        """Give an order and wait until it was obeyed, unless the order ends the engine."""
        self._orders.send(msgspec.msgpack.encode({"do": do, **more}))
        if do not in ("die", "fatal", "garbage", "sleep"):
            self.see("obeyed")

    def see(self, what: str) -> dict[str, Any]:
        """Return the next event of this kind: "started", "Submit", "Abort", "FlushCache". Others are kept for later."""
        for index, event in enumerate(self.later):
            if event["what"] == what:
                return self.later.pop(index)
        while True:
            event = msgspec.msgpack.decode(self.events.recv())
            if event["what"] == what:
                return event
            self.later.append(event)

    def plan(self, *steps: list[int], cached_tokens: int = 0) -> None:
        """Give every request from now on these steps at once. Its deltas report so many cached tokens of its prompt."""
        self.order("plan", steps=list(steps), cached_tokens=cached_tokens)

    def by_hand(self, cached_tokens: int = 0) -> None:
        """Let requests from now on wait for `emit`."""
        self.order("plan", steps=None, cached_tokens=cached_tokens)

    def emit(self, request_id: str, token_ids: list[int], **more: Any) -> None:
        self.order("emit", request_id=request_id, token_ids=token_ids, **more)

    def deliver(self, request_id: str, token_ids: list[int], steps: list[SpecStep], finish: str | None = None) -> None:
        """Let the engine send one delta of several steps, which is what a slow reader gets at once."""
        self.order("deliver", request_id=request_id, token_ids=token_ids, steps=steps, finish=finish)

    def ready(self, **info: Any) -> None:
        self.see("started")
        self.order("ready", info=self.info | info)

    def forget(self) -> None:
        """Drop the events that were not asked for."""
        self.later.clear()
        with contextlib.suppress(zmq.Again):
            while True:
                self.events.recv(zmq.NOBLOCK)

    def close(self) -> None:
        self._orders.close()
        self.events.close()
        self._context.term()


class Server:
    """Application on a real socket, in a thread with its own uvloop."""

    def __init__(
        self,
        script: Script,
        model_folder: Path,
        supervisor: dict[str, Any],
        admission: dict[str, Any] | None = None,
        hold_seconds: float = 0.0,
        tracer: Any = None,
        **settings: Any,
    ) -> None:
        self.script = script
        self._supervisor_options = supervisor
        self._admission_options = admission or {}
        self._config = Config.of(**{"model": "tiny", "reasoning_parser": "none", "tool_call_parser": "none"} | settings)
        self._hold_seconds = hold_seconds
        self._tracer = tracer
        self.tokenizer = Tokenizer(model_folder)
        self.metrics = Metrics()
        listener = socket.create_server(("127.0.0.1", 0))
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16384)  # Slow readers fill it soon.
        connection.set_stall_timeout(listener)
        listener.setblocking(False)
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        self._listener = listener
        self._started = threading.Event()
        self._thread = threading.Thread(target=lambda: uvloop.run(self._serve()), daemon=True)
        self._thread.start()
        assert self._started.wait(PATIENCE)
        self.http = httpx.Client(base_url=self.url, timeout=PATIENCE, verify=NO_TLS)
        self.openai = OpenAI(
            base_url=f"{self.url}/v1",
            api_key="none",
            max_retries=0,
            http_client=httpx.Client(timeout=PATIENCE, verify=NO_TLS),
        )

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        settings = json.dumps({"engine": {}, "target": "tiny", "draft": None})
        supervisor = Supervisor(self.script.command, settings, self.metrics, **self._supervisor_options)
        self.engine = EngineClient(supervisor, Admission(**self._admission_options), self.metrics)
        self.services = Services(self._config, self.engine, self.tokenizer, self.metrics, self._tracer)
        app = create_app(self.services, self._hold_seconds)
        http = self.uvicorn = uvicorn.Server(uvicorn.Config(app, **connection.SETTINGS, timeout_graceful_shutdown=1))
        self.engine.start()
        serving = asyncio.create_task(http.serve([self._listener]))
        self._started.set()
        await self._stop.wait()
        await self.engine.shutdown()
        http.should_exit = True
        await serving

    def call(self, make: Callable[[], Any]) -> Any:
        """Run a function on the server's loop, and wait for its result if that is a coroutine."""

        async def called() -> Any:
            found = make()
            return await found if inspect.isawaitable(found) else found

        return asyncio.run_coroutine_threadsafe(called(), self._loop).result(PATIENCE)

    def reach(self, phase: str) -> None:
        """Wait until the engine is in this phase."""
        self.until(lambda state: state.phase == phase)

    def ready(self, **info: Any) -> None:
        """Let the engine say that it is ready, with these facts of its own."""
        self.script.ready(**info)
        self.reach("ready")

    def until(self, reached: Callable[[EngineState], bool]) -> None:
        """Wait until `reached` is true of the engine's state."""

        async def wait() -> None:
            async with asyncio.timeout(PATIENCE):
                while not reached(self.engine.state):
                    await self.engine.supervisor.next_state()

        self.call(wait)

    def metric(self, name: str, **labels: str) -> float:
        """Return a sample's value, or 0 if there is none."""
        wanted = ",".join(f'{key}="{value}"' for key, value in labels.items())
        line = f"dflash:{name}{{{wanted}}} " if labels else f"dflash:{name} "
        for sample in self.http.get("/metrics").text.splitlines():
            if sample.startswith(line):
                return float(sample.removeprefix(line))
        return 0.0

    def until_metric(self, name: str, value: float, **labels: str) -> None:
        """Wait until a sample has this value."""
        deadline = time.monotonic() + PATIENCE
        while (found := self.metric(name, **labels)) != value:
            assert time.monotonic() < deadline, f"{name} is {found}, not {value}"
            time.sleep(0.01)

    def read_stream(self, fields: dict[str, Any], events: "Queue[str]") -> None:
        """Ask for a streamed completion, and put the data of its events on `events` as they come."""
        with self.http.stream("POST", "/v1/completions", json=fields | {"stream": True}) as response:
            for line in response.iter_lines():
                if line:
                    events.put(line.removeprefix("data: "))

    def settle(self) -> None:
        """Let every message in flight arrive, and drop it. Requests from then on wait for `emit`."""
        self.script.by_hand()
        self.call(self.engine.idle.wait)
        self.call(self.engine.flush_cache)
        self.script.see("FlushCache")  # It is behind every earlier command.
        until(lambda: not self.engine.admission.num_unacknowledged)  # Its reply is behind every earlier reply.
        self.script.forget()

    def begin(self, background: ThreadPoolExecutor, **fields: Any) -> tuple["Future[httpx.Response]", str]:
        """Return a completion that is running in the engine, and its id there."""
        fields = {"model": "tiny", "prompt": "hi"} | fields
        running = background.submit(lambda: self.http.post("/v1/completions", json=fields))
        return running, self.script.see("Submit")["request_id"]

    def check_serving(self) -> None:
        """Check that a request gets its answer."""
        self.script.plan([*self.ids("here"), 2])
        assert self.openai.completions.create(model="tiny", prompt="hi").choices[0].text == "here"

    def answer(self, token_ids: list[int]) -> str:
        """Emit the first tokens of the next request that the engine gets, and return its id."""
        request_id: str = self.script.see("Submit")["request_id"]
        self.script.emit(request_id, token_ids)
        return request_id

    def chunks(self, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the events of a streamed answer as they were parsed."""
        response = self.http.post(path, json=body | {"stream": True})
        assert response.status_code == 200, response.text
        return [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]

    def prompt(self) -> str:
        """Return the prompt of the next request that the engine gets, with its special tokens."""
        return self.tokenizer.decode(self.script.see("Submit")["token_ids"], skip_special_tokens=False)

    def plan_text(self, text: str, seed: int = 0) -> None:
        """Give every request from now on this answer, a token a byte, in steps of random sizes."""
        self.script.plan(*cut([*self.bytes(text), 2], seed))

    def text(self, token_ids: list[int]) -> str:
        return self.tokenizer.decode(token_ids)

    def ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text)

    def bytes(self, text: str) -> list[int]:
        """Return one token for every byte of `text`."""
        level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        return [self.tokenizer.backend.token_to_id(c) for part, _ in level.pre_tokenize_str(text) for c in part]

    def close(self) -> None:
        self.openai.close()
        self.http.close()
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive()


class Clock:
    """Replacement of a module's `time`, which stands still until a test moves it on."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


def cut(ids: list[int], seed: int) -> list[list[int]]:
    """Return the tokens in steps of random sizes."""
    random = Random(seed)
    cuts = sorted(random.sample(range(1, len(ids)), k=random.randrange(len(ids))))
    return [ids[a:b] for a, b in itertools.pairwise([0, *cuts, len(ids)])]


def until(true: Callable[[], object]) -> None:
    """Poll until `true` is, because no event tells of it."""
    deadline = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


async def next_delta(stream: RequestStream) -> TokenDelta | None:
    """Wait for a delta, and take it."""
    arrived = asyncio.Event()
    stream.notify(arrived)
    await arrived.wait()
    return stream.take()


@pytest.fixture(scope="module", autouse=True)
def patient_servers() -> Iterator[None]:
    """Let no server hang up because the machine is slow."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(connection, "HEAD_SECONDS", 10 * PATIENCE)
        patch.setattr(body, "BODY_SECONDS", 10 * PATIENCE)
        yield


@pytest.fixture
def background() -> Iterator[ThreadPoolExecutor]:
    """Yield threads for work that happens while the test waits for an answer."""
    with ThreadPoolExecutor(max_workers=32) as pool:
        yield pool


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a byte-level tokenizer of 512 ids, with the files of a Hugging Face folder."""
    folder = tmp_path_factory.mktemp("model")
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.save(str(folder / "tokenizer.json"))
    files = {
        "tokenizer_config.json": {"eos_token": "<|im_end|>", "chat_template": CHATML},
        "generation_config.json": {"eos_token_id": [2, 0], "do_sample": True, "temperature": 0.6},
        "config.json": {"model_type": "qwen3", "vocab_size": 512},
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    return folder


@contextlib.contextmanager
def serving(
    model_folder: Path,
    step_timeout: float = 120.0,
    supervisor: dict[str, Any] | None = None,
    admission: dict[str, Any] | None = None,
    template: str | None = None,
    **settings: Any,
) -> Iterator[Server]:
    """Yield a server whose engine has not said that it is ready. `supervisor` has the options of Supervisor,
    `admission` those of Admission; `settings` are those of its user, and `hold_seconds` and `tracer`. `template` is
    the model's chat template."""
    with tempfile.TemporaryDirectory(prefix="dft-") as folder:  # Short enough for sockets.
        if template is not None:
            model_folder = shutil.copytree(model_folder, Path(folder, "model"))
            (model_folder / "chat_template.jinja").write_text(template)
        script = Script(Path(folder))
        options = {"step_timeout": step_timeout, "backoff": 0.01} | (supervisor or {})
        settings = {"served_model_name": ["tiny", "also-tiny"]} | settings
        server = Server(script, model_folder, options, admission, **settings)
        try:
            yield server
        finally:
            server.close()
            script.close()


@contextlib.contextmanager
def serving_ready(model_folder: Path, **options: Any) -> Iterator[Server]:
    """Yield a ready server. With a chat template of the test's there is room for long prompts."""
    with serving(model_folder, **options) as server:
        server.ready(**({"max_model_len": 4096} if "template" in options else {}))
        server.script.plan([2])
        yield server


@pytest.fixture(scope="module")
def shared_server(request: pytest.FixtureRequest, model_folder: Path) -> Iterator[Server]:
    """Yield one ready server for all tests of a module that leave it as they found it. SERVED has its settings."""
    with serving_ready(model_folder, **getattr(request.module, "SERVED", {})) as server:
        yield server


@pytest.fixture
def server(shared_server: Server) -> Iterator[Server]:
    """Yield a ready server. Requests wait for the test to emit tokens unless it plans them."""
    shared_server.settle()
    yield shared_server


@pytest.fixture
def own_server(model_folder: Path) -> Iterator[Server]:
    """Yield a server of this test's own, whose engine has not said that it is ready."""
    with serving(model_folder) as server:
        yield server
