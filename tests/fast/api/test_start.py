"""A start that fails leaves nothing open."""

import resource
import shutil
import socket

import pytest

from app.api import process
from app.api.server import Server
from app.config.settings import Config
from app.engine_client.kv_events import KvEventPublisher


@pytest.mark.parametrize("config", [Config(), Config.of()])
def test_a_server_starts_only_with_models_that_were_found(config, model_folder, monkeypatch):
    monkeypatch.chdir(model_folder)
    with pytest.raises(AssertionError, match="with_models"):
        Server(config)
    Server(config.with_models(model_folder, None))


def test_a_server_takes_its_tokenizer_and_its_sampling_defaults_from_the_settings(model_folder, tmp_path):
    texts = shutil.copytree(model_folder, tmp_path / "texts")
    (texts / "chat_template.jinja").write_text("other")
    model = shutil.copytree(model_folder, tmp_path / "model")
    (model / "generation_config.json").write_text('{"top_k": 7, "min_p": 0.5}')
    settings = {"generation_config": "vllm", "override_generation_config": {"temperature": 0.5}, "seed": 1}
    config = Config.of(**settings).with_models(model, None, texts)
    services = [Server(config).services for _ in range(2)]
    tokenizer = services[0].tokenizer
    assert tokenizer.chat_template.source == "other"
    assert (tokenizer.defaults.temperature, tokenizer.defaults.top_k, tokenizer.defaults.min_p) == (0.5, 0, 0.0)
    first, second = ([each.next_seed() for _ in range(3)] for each in services)
    assert first == second and len(set(first)) == 3
    seeds = {Server(Config.of().with_models(model, None)).services.next_seed() for _ in range(2)}
    assert len(seeds) == 2


def test_with_its_port_taken_a_server_opens_no_socket_of_events(model_folder, monkeypatch, caplog):
    bound = []
    monkeypatch.setattr(KvEventPublisher, "bind", bound.append)
    monkeypatch.setattr(process.log, "set_up", lambda *_: None)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        config = Config(model="tiny", port=port, kv_events_config={"enable_kv_cache_events": True})
        assert process.run(config.with_models(model_folder, None)) == 1
    assert "cannot listen on" in caplog.text
    assert not bound


def test_an_address_of_events_that_is_taken_is_one_line(model_folder, monkeypatch, caplog):
    monkeypatch.setattr(process.log, "set_up", lambda *_: None)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        events = {"enable_kv_cache_events": True, "endpoint": f"tcp://127.0.0.1:{taken.getsockname()[1]}"}
        assert process.run(Config(model="tiny", port=0, kv_events_config=events).with_models(model_folder, None)) == 1
    assert "--kv-events-config: an endpoint cannot be bound" in caplog.text


def test_a_limit_of_open_files_that_no_start_survives_is_one_line(model_folder, monkeypatch, caplog):
    monkeypatch.setattr(process.log, "set_up", lambda *_: None)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (127, hard))
    try:
        assert process.run(Config(model="tiny", port=0).with_models(model_folder, None), engine_command=["false"]) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert "only 127 files may be open: the server needs 128" in caplog.text


def test_a_model_without_an_end_of_text_is_warned_of(model_folder, tmp_path, caplog):
    Server(Config.of().with_models(model_folder, None))
    assert "no token ends a text" not in caplog.text
    endless = shutil.copytree(model_folder, tmp_path / "endless")
    (endless / "tokenizer_config.json").unlink()
    (endless / "generation_config.json").unlink()
    Server(Config.of().with_models(endless, None))
    assert "no token ends a text" in caplog.text
