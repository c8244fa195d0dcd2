"""The `dflash-server` command. A command imports its part when it runs, so that `--help` is quick."""

import os
import sys
from collections.abc import Callable, Sequence

from app.config.error import ConfigError, nearest

USAGE = """\
usage: dflash-server COMMAND ...

An OpenAI-compatible server that decodes with DFlash block-diffusion speculative decoding.

commands:
  serve [MODEL]   serve a model; without MODEL the small demo pair that is shipped
  check           check whether the server can run on this machine's device, and what to do if not

options:
  -h, --help      show this help; `dflash-server COMMAND --help` lists the flags of a command
  --version       show the version
"""


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
        meant = " ".join([nearest(command, COMMANDS) or f"serve {command}", *flags])
        return ConfigError(f"unknown command {command}", f"did you mean `dflash-server {meant}`?").show()
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
    config = config.with_models(*find_models(config.model, config.draft_model, speculation=config.speculation))
    target_config = check_models(config.engine)

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
