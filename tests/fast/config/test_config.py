"""Settings: the sources of a value, their order, and the error that each mistake gets."""

import json
import os
from pathlib import Path

import pytest
from pydantic import ValidationError

from app.config.aliases import PEER_FLAGS
from app.config.engine import EngineConfig
from app.config.error import ConfigError
from app.config.flags import parse_flags
from app.config.pairs import PAIRS, default_model
from app.config.settings import Config, check_settings, flag_name
from app.config.sources import SETTINGS, GivenSetting, load_config
from app.config.values import parse_bytes
from app.wire import decode_config, encode_config

VLLM_CONFIG = '{"method": "dflash", "model": "draft", "num_speculative_tokens": 15}'


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("DFLASH_")]:
        monkeypatch.delenv(name)


def flag(field: str, value: object) -> GivenSetting:
    return GivenSetting("--" + field.replace("_", "-"), field, value)


def yaml_file(folder: Path, text: str) -> GivenSetting:
    file = folder / "server.yaml"
    file.write_text(text)
    return GivenSetting("--config", "config", str(file))


def refusal(*settings: GivenSetting) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load_config(settings)
    return caught.value


def test_flags_win_over_environment_over_yaml_over_defaults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = yaml_file(tmp_path, "port: 1\nmax_num_seqs: 1\npage-size: 1\n")
    monkeypatch.setenv("DFLASH_PORT", "2")
    monkeypatch.setenv("DFLASH_MAX_NUM_SEQS", "2")
    config = load_config([file, flag("port", "3")])
    assert (config.port, config.engine.max_num_seqs, config.engine.page_size, config.host) == (3, 2, 1, "127.0.0.1")


def test_the_environment_may_name_the_yaml_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DFLASH_CONFIG", yaml_file(tmp_path, "port: 1234").value)
    assert load_config().port == 1234


def test_a_flag_wins_over_a_speculative_config_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DFLASH_SPECULATIVE_CONFIG", VLLM_CONFIG)
    config = load_config([flag("num_speculative_tokens", "7")])
    assert (config.draft_model, config.num_speculative_tokens) == ("draft", 7)


def test_the_nearer_source_decides_between_the_two_memory_limits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = yaml_file(tmp_path, "kv_cache_memory: 4GiB")
    assert load_config([file]).engine.kv_cache_memory == 4 * 2**30
    monkeypatch.setenv("DFLASH_MEMORY_UTILIZATION", "0.5")
    config = load_config([file])
    assert (config.engine.kv_cache_memory, config.engine.memory_utilization) == (None, 0.5)


@pytest.mark.parametrize("field", ["modle", "prot"])
def test_an_unknown_environment_variable_names_the_nearest(field: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DFLASH_" + field.upper(), "x")
    error = refusal()
    assert f"DFLASH_{field.upper()}" in str(error)
    assert error.hint in ("did you mean DFLASH_MODEL?", "did you mean DFLASH_PORT?")


@pytest.mark.parametrize(
    ("text", "why", "hint"),
    [
        ("- a\n- b", "mapping", ""),
        ("a: [", "not YAML", ""),
        (None, "cannot be read", ""),
        ("max_num_seq: 4", "max_num_seq", "did you mean max_num_seqs?"),
        ("gpu-memory-utilization: 0.9", "gpu-memory-utilization", "it is memory_utilization here"),
        ("download_dir: d", "download_dir", "refused: set HF_HUB_CACHE in the environment"),
    ],
)
def test_a_yaml_file_that_cannot_be_used_is_named(tmp_path: Path, text: str | None, why: str, hint: str) -> None:
    said = yaml_file(tmp_path, text or "")
    if text is None:
        Path(said.value).unlink()
    error = refusal(said)
    assert why in str(error) and "server.yaml" in str(error) and hint in error.hint


def test_variables_that_kubernetes_sets_for_a_service_are_not_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    for service in ("DFLASH", "DFLASH_SERVER"):
        monkeypatch.setenv(f"{service}_SERVICE_HOST", "10.0.0.1")
        monkeypatch.setenv(f"{service}_SERVICE_PORT", "8000")
        monkeypatch.setenv(f"{service}_PORT", "tcp://10.0.0.1:8000")
        monkeypatch.setenv(f"{service}_PORT_8000_TCP_ADDR", "10.0.0.1")
    assert load_config().port == 8000


def test_an_empty_environment_variable_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DFLASH_MODEL", "")
    assert load_config().model == default_model()


def test_a_bad_value_is_told_with_the_name_it_was_given_under(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert str(refusal(flag("port", "abc"))).startswith("--port abc: ")
    assert str(refusal(yaml_file(tmp_path, "port: 70000"))).startswith(f"port in {tmp_path}")
    monkeypatch.setenv("DFLASH_PORT", "abc")
    assert str(refusal()).startswith("DFLASH_PORT abc: ")


@pytest.mark.parametrize(
    "text",
    [
        '{"num_speculative_tokens": 8, "method":"dflash","model":"draft","enforce_eager": true}',
        VLLM_CONFIG,
        '{"model": "draft", "num_speculative_tokens": 5, "method": "dflash", "draft_tensor_parallel_size": 1}',
    ],
    ids=["vllm-ascend", "vllm", "vllm with draft_tensor_parallel_size"],
)
def test_a_peers_speculative_config_starts_as_it_stands_or_as_a_mapping_in_yaml(tmp_path: Path, text: str) -> None:
    said = json.loads(text)
    for setting in (flag("speculative_config", text), yaml_file(tmp_path, f"speculative_config: {text}")):
        config = load_config([setting])
        assert config.draft_model == "draft"
        assert config.num_speculative_tokens == said["num_speculative_tokens"]
        assert config.engine.draft_enforce_eager == said.get("enforce_eager", False)
        assert not config.engine.enforce_eager


def test_keys_of_a_speculative_config_that_change_no_text_are_told(tmp_path: Path) -> None:
    text = '{"method": "dspark", "model": "d", "draft_sample_method": "greedy", "attention_backend": "FLASH_ATTN"}'
    for setting in (flag("speculative_config", text), yaml_file(tmp_path, f"speculative_config: {text}")):
        sampled, attention = load_config([flag("model", "x"), setting]).notes
        assert "draft_sample_method" in sampled and "target's own choice" in sampled
        assert "attention_backend" in attention and "the device decides" in attention


@pytest.mark.parametrize("without", [[], [flag("draft_model", "d"), flag("speculation", False)]])
def test_settings_of_a_draft_are_told_where_none_is_served(monkeypatch, without: list[GivenSetting]) -> None:
    monkeypatch.setenv("DFLASH_DRAFT_WINDOW", "64")
    given = [flag("model", "x"), flag("draft_quantization", "int8"), flag("verify", "4")]
    notes = load_config([*given, *without]).notes
    assert [note.partition(": ")[0] for note in notes] == ["--draft-quantization", "--verify", "DFLASH_DRAFT_WINDOW"]
    assert set(notes) == {f"{note.partition(': ')[0]}: nothing to set, no draft is served" for note in notes}
    assert load_config([*given, flag("draft_model", "d")]).notes == ()


@pytest.mark.parametrize("text", ['{"method": "dflash"}', '{"num_speculative_tokens": 7}'])
def test_a_speculative_config_without_a_draft_is_for_pairs_alone(tmp_path: Path, monkeypatch, text: str) -> None:
    wish, target = flag("speculative_config", text), flag("model", "x")
    for asked in (wish, yaml_file(tmp_path, f"speculative_config: {text}")):
        assert "names no draft" in str(refusal(target, asked))
        assert load_config([asked]).model == default_model()
        assert all(load_config([flag("model", name), asked]).model == name for name in PAIRS)
        assert load_config([target, asked, flag("draft_model", "d")]).draft_model == "d"
        assert not load_config([target, asked, flag("speculation", False)]).speculation
    monkeypatch.setenv("DFLASH_SPECULATIVE_CONFIG", text)
    assert "DFLASH_SPECULATIVE_CONFIG names no draft" in str(refusal(target))


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ('{"method": "eagle3", "model": "x"}', "eagle3"),
        ('{"method": "dflash", "modle": "x"}', "modle"),
        ('{"model": "x", "draft_tensor_parallel_size": 0}', "greater than 0"),
        ('{"model": "x"', "not JSON"),
        ("[1]", "object"),
    ],
)
def test_what_a_speculative_config_may_not_say_is_refused_by_name(text: str, named: str) -> None:
    error = refusal(flag("speculative_config", text))
    assert named in str(error) and "--speculative-config" in str(error)


def test_saying_a_thing_twice_with_different_values_is_an_error_naming_both() -> None:
    error = refusal(flag("speculative_config", VLLM_CONFIG), flag("num_speculative_tokens", "7"))
    assert "--speculative-config" in str(error) and "--num-speculative-tokens" in str(error)
    assert load_config([flag("speculative_config", VLLM_CONFIG), flag("num_speculative_tokens", "15")])


@pytest.mark.parametrize(
    "flags", ["-b 2048 -ub 512", "--chunked-prefill-size 512", "--ubatch-size 4096 --max-num-batched-tokens 512 -b 600"]
)
def test_of_several_bounds_of_a_steps_rows_the_smallest_counts(flags: str) -> None:
    assert load_config(parse_flags(flags.split())).engine.max_num_batched_tokens == 512


@pytest.mark.parametrize("flags", ["-b 512 -ub none", "-ub 0 -b 512", "--chunked-prefill-size -1"])
def test_a_bound_of_a_steps_rows_that_is_no_number_is_refused_by_its_name(flags: str) -> None:
    with pytest.raises(ConfigError, match=r"^(-ub (none|0)|--chunked-prefill-size -1): input should be"):
        load_config(parse_flags(flags.split()))


def test_both_memory_limits_in_one_source_exclude_each_other() -> None:
    error = refusal(flag("kv_cache_memory", "1GiB"), flag("memory_utilization", "0.9"))
    assert "--kv-cache-memory" in str(error) and "--memory-utilization" in str(error)


def test_the_engine_process_reads_what_the_api_process_wrote_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = yaml_file(tmp_path, "port: 1\nmax_num_seqs: 1\nverify: 4")
    monkeypatch.setenv("DFLASH_SPECULATIVE_CONFIG", VLLM_CONFIG)
    config = load_config([file, flag("kv_cache_memory", "2G")])
    line = encode_config(config.with_models(Path("target"), None).engine)
    Path(file.value).unlink()
    monkeypatch.setenv("DFLASH_MAX_NUM_SEQS", "99")
    monkeypatch.setenv("DFLASH_NO_SUCH_THING", "1")
    assert decode_config(line) == EngineConfig(
        Path("target"), block_size=16, max_num_seqs=1, verify=4, kv_cache_memory=2**31
    )


def test_an_engine_by_default_is_the_one_that_is_served_by_default() -> None:
    assert load_config().with_models(Path("a"), Path("b")).engine == EngineConfig(Path("a"), Path("b"))


def test_settings_are_frozen() -> None:
    with pytest.raises(ValidationError):
        Config().port = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    ("text", "size"),
    [("4GiB", 2**32), ("512MiB", 2**29), ("2G", 2**31), ("2GB", 2 * 10**9), ("1.5g", 3 * 2**29), ("77", 77)],
)
def test_memory_may_be_given_with_a_unit(text: str, size: int) -> None:
    assert parse_bytes(text) == size
    assert load_config([flag("kv_cache_memory", text)]).engine.kv_cache_memory == size


@pytest.mark.parametrize("text", ["", "GiB", "-1", "4 potatoes", "4iB2"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="512MiB"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("said", "dtype"),
    [("half", "float16"), ("fp16", "float16"), ("float", "float32"), ("fp32", "float32"), ("BF16", "bfloat16")],
)
def test_short_spellings_of_dtypes_are_understood(said: str, dtype: str) -> None:
    assert load_config([flag("dtype", said)]).engine.dtype == dtype


@pytest.mark.parametrize("device", ["auto", "cpu", "cuda", "cuda:1", "npu", "npu:7"])
def test_a_device_may_carry_an_index(device: str) -> None:
    assert load_config([flag("device", device)]).engine.device == device


@pytest.mark.parametrize(
    ("field", "value", "why"),
    [
        ("device", "tpu", "cuda:N"),
        ("device", "cpu:0", "cuda:N"),
        ("num_speculative_tokens", "0", "--no-speculation"),
        ("tensor_parallel_size", "0", "greater than 0"),
        ("memory_utilization", "1.5", "less than or equal to 1"),
        ("max_num_seqs", "0", "greater than 0"),
        ("dtype", "int8", "bfloat16"),
        ("page_size", "100000000", "less than or equal to 1024"),
        ("shutdown_timeout", "inf", "finite"),
        ("request_timeout", "-1", "greater than or equal to 0"),
        ("request_timeout", "inf", "finite"),
        ("max_queue", "-1", "greater than or equal to 0"),
        ("max_concurrency_per_key", "0", "greater than 0"),
        ("step_timeout", "0", "greater than 0"),
        ("metrics_prefix", "a b", "pattern"),
        ("model", "", "at least 1 character"),
        ("tool_call_parser", "mistral", "'qwen3'"),
        ("reasoning_parser", "llama3_json", "--reasoning-parser"),
        *(("root_path", path, "--root-path") for path in ("llm", "/", "/llm/", "//llm", "/l m", "https://x/llm")),
    ],
)
def test_a_refused_value_says_what_is_allowed(field: str, value: str, why: str) -> None:
    assert why in str(refusal(flag(field, value)))


def test_the_peer_table_names_only_settings_that_exist() -> None:
    assert {peer.field for peer in PEER_FLAGS if peer.field} <= SETTINGS.keys()
    page_size = next(peer for peer in PEER_FLAGS if peer.names == ["--block-size"])
    assert page_size.ours == "--page-size"
    assert page_size.note == "tokens of a KV page, not the DFlash block"


@pytest.mark.parametrize(
    ("given", "keys"),
    [
        (["a", "b"], ["a", "b"]),
        (['["a", "b"]'], ["a", "b"]),
        (["correct horse"], ["correct horse"]),
        (['["correct horse"]'], ["correct horse"]),
    ],
    ids=str,
)
def test_keys_come_from_flags_words_json_and_yaml(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: list[str], keys: list[str]
) -> None:
    assert load_config().api_keys() == load_config().admin_key == []
    monkeypatch.setenv("DFLASH_API_KEY", "a b")
    monkeypatch.setenv("DFLASH_ADMIN_KEY", "a b")
    config = load_config()
    assert config.api_keys() == config.admin_key == ["a", "b"]
    config = load_config([flag("api_key", given), flag("admin_key", given)])
    assert config.api_keys() == config.admin_key == keys
    monkeypatch.delenv("DFLASH_API_KEY")
    monkeypatch.delenv("DFLASH_ADMIN_KEY")
    config = load_config([yaml_file(tmp_path, f"api_key: {json.dumps(given)}\nadmin_key: {json.dumps(given)}")])
    assert config.api_keys() == config.admin_key == keys


def test_keys_are_in_no_representation_of_the_settings_and_in_no_mistake(tmp_path: Path) -> None:
    config = load_config([flag("api_key", ["secret-key"]), flag("admin_key", ["secret-key"])])
    assert "secret-key" not in repr(config) + str(config) + repr(list(config.__repr_args__()))
    for field in ("api_key", "admin_key"):
        error = refusal(yaml_file(tmp_path, f"{field}: [secret-key, 12345]"))
        assert "secret-key" not in str(error) and "12345" not in str(error)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
def test_a_file_adds_its_keys_one_a_line(tmp_path: Path, encoding: str) -> None:
    (tmp_path / "keys").write_text("\n  first \n\nsecond\r\n", encoding=encoding)
    said = flag("api_key_file", str(tmp_path / "keys"))
    assert load_config([said]).api_keys() == ["first", "second"]
    assert load_config([said, flag("api_key", ["given"])]).api_keys() == ["given", "first", "second"]


@pytest.mark.parametrize("content", [None, b"", b" \n\n", b"\xff\xfe\x00"])
def test_a_key_file_that_holds_no_key_is_named_and_never_means_no_keys(tmp_path: Path, content: bytes | None) -> None:
    file = tmp_path / "keys"
    if content is not None:
        file.write_bytes(content)
    config = load_config([flag("api_key_file", str(file))])
    with pytest.raises(ConfigError, match=f"--api-key-file {file}"):
        config.api_keys()


@pytest.mark.parametrize("value", [[""], ["  "], ['[""]'], ["[]"], ['["a", " "]']])
def test_a_key_that_is_asked_for_and_empty_is_refused_and_never_means_no_keys(value: list[str]) -> None:
    """`--api-key "$UNSET"` asks for a closed server, so an empty key must not open it."""
    for field in ("api_key", "admin_key"):
        assert flag_name(field) in str(refusal(flag(field, value)))


def test_template_defaults_are_json_or_a_mapping_in_yaml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = {"enable_thinking": False}
    assert (
        load_config([flag("default_chat_template_kwargs", json.dumps(wanted))]).default_chat_template_kwargs == wanted
    )
    file = yaml_file(tmp_path, "default_chat_template_kwargs: {enable_thinking: false}")
    assert load_config([file]).default_chat_template_kwargs == wanted
    monkeypatch.setenv("DFLASH_DEFAULT_CHAT_TEMPLATE_KWARGS", json.dumps(wanted))
    assert load_config().default_chat_template_kwargs == wanted


@pytest.mark.parametrize("text", ["enable_thinking=false", "{", "[1]", '"x"', "null"])
def test_template_defaults_that_are_no_object_are_refused(text: str) -> None:
    assert "--default-chat-template-kwargs" in str(refusal(flag("default_chat_template_kwargs", text)))


@pytest.mark.parametrize(
    ("field", "said", "parser"),
    [
        *(
            (field, said, "none" if said == "none" else "qwen3")
            for field in ("reasoning_parser", "tool_call_parser")
            for said in ("qwen3", "Qwen3", "hermes", "deepseek_r1", "none")
        ),
        *(("tool_call_parser", said, "llama3_json") for said in ("llama3_json", "llama3", "Llama4_JSON")),
        *(("tool_call_parser", said, "qwen3_coder") for said in ("qwen3_coder", "Qwen3_XML")),
    ],
)
def test_parsers_may_be_named_as_peers_name_them(field: str, said: str, parser: str) -> None:
    assert getattr(load_config([flag(field, said)]), field) == parser


@pytest.mark.parametrize("path", ["", "/llm", "/llm/v2"])
def test_a_root_path_begins_with_a_slash_and_does_not_end_with_one(path: str) -> None:
    assert load_config([flag("root_path", path)]).root_path == path


def test_origins_are_words_or_a_list(tmp_path: Path) -> None:
    assert load_config([flag("allowed_origins", ["https://a", '["https://b"]'])]).allowed_origins == [
        "https://a",
        "https://b",
    ]
    assert load_config([yaml_file(tmp_path, 'allowed_origins: "*"')]).allowed_origins == ["*"]


KV_EVENTS = '{"enable_kv_cache_events": true, "publisher": "zmq", "endpoint": "tcp://*:5556", "topic": "kv@pod@tiny"}'


def test_vllms_options_of_kv_events_reach_the_engine(tmp_path: Path) -> None:
    config = load_config([flag("kv_events_config", KV_EVENTS)])
    assert config.kv_events_config and config.kv_events_config.topic == "kv@pod@tiny"
    assert config.engine.cache_events
    config = load_config([yaml_file(tmp_path, "kv_events_config: {enable_kv_cache_events: false}")])
    assert not config.engine.cache_events
    assert not load_config().engine.cache_events


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("{}", "enable_kv_cache_events"),
        ('{"enable_kv_cache_events": true, "max_queue_size": 5}', "max_queue_size"),
        ('{"enable_kv_cache_events": true, "publisher": "kafka"}', "publisher"),
        ("{", "not JSON"),
    ],
)
def test_options_of_kv_events_that_mean_nothing_here_are_refused_by_name(text: str, named: str) -> None:
    error = refusal(flag("kv_events_config", text))
    assert named in str(error) and "--kv-events-config" in str(error)


def test_kv_events_need_a_prefix_cache(tmp_path: Path) -> None:
    config = load_config([flag("kv_events_config", KV_EVENTS), flag("prefix_caching", False)])
    with pytest.raises(ConfigError, match="--no-prefix-caching"):
        check_settings(config)
