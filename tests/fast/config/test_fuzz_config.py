"""Any flags, variables and YAML become settled settings or an error of one line, never a traceback."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from app.config.aliases import PEER_FLAGS
from app.config.error import ConfigError
from app.config.flags import parse_flags
from app.config.settings import env_name, flag_name, no_flag_name
from app.config.sources import SETTINGS, load_config
from app.wire import decode_config, encode_config

ANY = settings(max_examples=150, suppress_health_check=list(HealthCheck))
FIELDS = sorted(set(SETTINGS) - {"config"})
FLAGS = sorted(
    {flag_name(field) for field in FIELDS if field != "model"}
    | {no_flag_name(field) for field in FIELDS}
    | {name for peer in PEER_FLAGS for name in peer.names}
    | {"--no-such-flag", "--", "-", "-x"}
)

no_zero_bytes = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=12)
"""Text that an environment and a command line can hold."""
words = no_zero_bytes | st.sampled_from(
    '1 0 -1 1.5 1e400 nan inf 99999999999999999999 ١٢ true no auto full cpu npu:0 bf16 4GiB 1.5.5G /a [] {} ["a"] [1'
    ' {"method":"dflash"} {"model":1} null dflash DFLASH'.split(" ")
)
scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.dates() | st.binary(max_size=5) | words
anything = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(scalars, inner, max_size=3), max_leaves=6
)

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | words,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3),
    max_leaves=6,
)


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("DFLASH_")]:
        monkeypatch.delenv(name)


def check(arguments: list[str]) -> None:
    """Settle the arguments, or get an error of one line. The engine process reads its settings as they are."""
    try:
        config = load_config(parse_flags(arguments))
    except ConfigError as error:
        assert str(error).strip() and "Traceback" not in str(error)
    except SystemExit as end:
        assert end.code == 0  # --help
    else:
        assert decode_config(encode_config(config.engine)) == config.engine


@settings(ANY)
@given(st.lists(st.sampled_from(FLAGS) | words, max_size=6))
def test_any_command_line_is_settled_or_told_what_is_wrong(arguments: list[str]) -> None:
    check(arguments)


@pytest.mark.exhaustive
@settings(ANY)
@given(st.sampled_from(FLAGS), words)
def test_any_value_of_a_flag_is_settled_or_told_what_is_wrong(flag: str, value: str) -> None:
    check([flag, value])
    check([f"{flag}={value}"])


@pytest.mark.exhaustive
@settings(ANY)
@given(st.dictionaries(st.sampled_from([*FIELDS, "nonsense"]), words, min_size=1, max_size=3))
def test_any_environment_is_settled_or_told_what_is_wrong(variables: dict[str, str]) -> None:
    with pytest.MonkeyPatch.context() as environment:
        for field, value in variables.items():
            environment.setenv(env_name(field), value)
        check([])


@pytest.mark.exhaustive
@settings(ANY)
@given(st.dictionaries(st.sampled_from(FIELDS) | scalars, anything, max_size=3) | anything)
def test_any_yaml_is_settled_or_told_what_is_wrong(tmp_path_factory: pytest.TempPathFactory, content: Any) -> None:
    file = tmp_path_factory.getbasetemp() / "any.yaml"
    file.write_text(yaml.safe_dump(content, allow_unicode=True), encoding="utf-8")
    check(["--config", str(file)])


@pytest.mark.exhaustive
@settings(ANY)
@given(st.binary(max_size=40) | st.text("ab:-[]{}&*!|>'\"%@`#,? \n\t0", max_size=30).map(str.encode))
def test_any_file_is_settled_or_told_what_is_wrong(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    file = tmp_path_factory.getbasetemp() / "any.yaml"
    file.write_bytes(content)
    check(["--config", str(file)])


@pytest.mark.exhaustive
@settings(ANY)
@given(json_values)
def test_any_speculative_config_and_template_kwargs_are_settled_or_told_what_is_wrong(value: Any) -> None:
    check(["--speculative-config", json.dumps(value)])
    check(["--speculative-config", json.dumps({"method": "dflash", "model": value})])
    check(["--default-chat-template-kwargs", json.dumps(value)])
    check(["--default-chat-template-kwargs", json.dumps({"enable_thinking": value})])


@pytest.mark.parametrize(
    "arguments",
    [
        ("--kv-cache-memory", "9" * 400),
        ("--speculative-dflash-block-size", "9" * 5000),
        ("--speculative-config", '{"num_speculative_tokens": ' + "9" * 5000 + "}"),
        ("--speculative-config", "[" * 100_000),
        ("--default-chat-template-kwargs", "[" * 100_000),
        ("--default-chat-template-kwargs", '{"a": "\\ud800"}'),
        ("--api-key", "[" * 100_000),
        ("--api-key", "\udcff"),
        ("--host", "\udcff"),
        ("--config", "/"),
    ],
    ids=lambda arguments: " ".join(arguments)[:50].encode("ascii", "backslashreplace").decode(),
)
def test_a_value_that_breaks_what_reads_it_is_told(arguments: tuple[str, str]) -> None:
    """Numbers have thousands of digits, brackets never end, and bytes are no UTF-8 (\\udcff in an argument)."""
    check(list(arguments))


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "content",
    [
        "port: 2001-99-99",
        "port: 0x_",
        "port: !!int x",
        "port: !!bool x",
        "port: !!timestamp x",
        "port: " + "9" * 5000,
        "[" * 3000,
        "default_chat_template_kwargs: &x {a: *x}",
        "default_chat_template_kwargs: {a: !!binary aGVsbG//}",
    ],
    ids=lambda content: content[:50],
)
def test_a_yaml_file_that_breaks_its_reader_is_told(tmp_path: Path, content: str) -> None:
    (tmp_path / "any.yaml").write_text(content)
    check(["--config", str(tmp_path / "any.yaml")])
