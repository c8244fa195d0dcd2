import json
import logging
from collections.abc import Iterator

import pytest

from app import log
from app.api.display import print_error


@pytest.fixture(autouse=True)
def root_logger_as_it_was() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:], root.level = handlers, level


def test_json_lines_carry_the_request_id_of_their_task(capsys):
    log.set_up("info", "json")
    token = log.request.set({"request_id": "abc"})
    logging.getLogger("app.x").info("hello %s", "wörld")
    log.request.reset(token)
    logging.getLogger("app.x").info("later")
    first, second = (json.loads(line) for line in capsys.readouterr().err.splitlines())
    assert (first["message"], first["level"], first["logger"], first["request_id"]) == (
        "hello wörld",
        "INFO",
        "app.x",
        "abc",
    )
    assert "request_id" not in second


def test_json_lines_hold_a_traceback_in_one_line(capsys):
    log.set_up("info", "json")
    try:
        raise ValueError("broken")
    except ValueError:
        logging.getLogger("app.x").exception("it failed")
    (line,) = capsys.readouterr().err.splitlines()
    assert "ValueError: broken" in json.loads(line)["exception"]


def test_text_lines_end_with_the_request_id(capsys):
    log.set_up("info", "text")
    token = log.request.set({"request_id": "abc"})
    logging.getLogger("app.x").info("hello")
    log.request.reset(token)
    assert capsys.readouterr().err.endswith("INFO app.x hello [abc]\n")


@pytest.mark.parametrize(("style", "begins"), [("text", "error: no such key: [redacted]"), ("json", "{")])
def test_the_last_line_is_an_error_for_people_and_an_object_for_machines(capsys, style, begins):
    log.set_up("error", style, ["s3cret-key"])
    print_error("no such key: s3cret-key")
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(begins)
    assert style == "text" or json.loads(line)["message"] == "no such key: [redacted]"


def test_on_a_terminal_a_line_takes_the_place_of_the_progress_bar(capsys, monkeypatch):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    log.set_up("info", "text")
    logging.getLogger("app.x").info("hello")
    assert capsys.readouterr().err.startswith("\r\x1b[2K")


def test_lines_below_the_level_are_not_written(capsys):
    log.set_up("warning", "text")
    logging.getLogger("app.x").info("hello")
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("style", ["text", "json"])
def test_no_key_is_written_wherever_it_stands(capsys, style):
    log.set_up("info", style, ["s3cret-key", 'a"quoted\\key', "s3cret-key-and-more", "base64+ends=="])
    logger = logging.getLogger("app.x")
    logger.info("given s3cret-key-and-more and %s", 'a"quoted\\key')
    logger.info("headers %s", {"Authorization": "Bearer nobody-knows-this-one"})
    logger.info("authorization: bEaReR nor-this")
    logger.info("path /v1/base64%2Bends%3D%3D token=Bearer%20nor-that")
    try:
        raise ValueError("s3cret-key is wrong")
    except ValueError:
        logger.exception("refused")
    written = capsys.readouterr().err
    for secret in ("s3cret", "and-more", "quoted", "nobody", "nor-this", "base64", "nor-that"):
        assert secret not in written
    assert written.count("[redacted]") >= 5
    assert style == "text" or [json.loads(line) for line in written.splitlines()]


@pytest.mark.parametrize("style", ["text", "json"])
@pytest.mark.parametrize("short", ["a", "demo", "test", "info", "message", "1234567"])
def test_a_short_key_garbles_no_line_and_is_warned_of(capsys, style, short):
    log.set_up("info", style, [short, "long-enough", short])
    logging.getLogger("app.x").info("a demo for a test, with a message of 12345678 letters, long-enough")
    warned, line = capsys.readouterr().err.splitlines()
    assert "WARNING" in warned and "keys with fewer than 8 characters (1 of 2)" in warned and "openssl" in warned
    assert "a demo for a test, with a message of 12345678 letters, [redacted]" in line
    assert style == "text" or json.loads(line)["level"] == "INFO"


def test_a_log_without_keys_or_with_long_ones_warns_of_none(capsys):
    for keys in ([], ["12345678"]):
        log.set_up("info", "text", keys)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("style", ["text", "json"])
@pytest.mark.parametrize(
    "hidden", ["\x1b", "\x7f", "\x9b", "\u2028", "\u202e", "\u2066", "\ufeff", "\U000e0041", "\udc9b"]
)
def test_what_a_client_sent_neither_moves_a_terminal_nor_hides_in_a_line(capsys, style, hidden):
    log.set_up("info", style)
    try:
        raise ValueError(f"given é{hidden}31m")
    except ValueError:
        logging.getLogger("app.x").exception("refused %s", hidden, extra={"fields": {"objective": f"a{hidden}b"}})
    written = capsys.readouterr().err
    assert hidden not in written and "é" in written
    assert all(line.isprintable() for line in written.splitlines())
    if style == "json":
        (line,) = written.splitlines()
        assert json.loads(line)["objective"] == f"a{hidden}b"
    else:
        assert "refused \\u" in written
