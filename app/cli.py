"""The `dflash-server` command. Nothing heavy is imported before the settings are known, so that `--help` is quick."""

import argparse
import importlib.util
import os
import re
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from app.config.settings import Config, Said

USAGE = """\
usage: dflash-server COMMAND ...

An OpenAI-compatible server that decodes with DFlash block-diffusion speculative decoding.

commands:
  serve [MODEL]   serve a model; without MODEL the small demo pair that is shipped
  check           tell whether the server can run on this machine's device, and what to do if not
  npu-report      measure an Ascend NPU and write down what it does: operators, open points, engine, time
  bench           measure servers and engines against one another, by turns

options:
  -h, --help      show this help; `dflash-server COMMAND --help` lists the flags of a command
  --version       show the version
"""

METAVARS = {
    "config": "FILE",
    "api_key_file": "FILE",
    "speculative_config": "JSON",
    "default_chat_template_kwargs": "JSON",
    "served_model_name": "NAME",
    "api_key": "KEY",
    "admin_key": "KEY",
    "allowed_origins": "ORIGIN",
}
CPU_INDEX = "https://download.pytorch.org/whl/cpu"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line. Returns the exit code: 2 for a user's mistake, which is told in one line and a hint."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    command = arguments[0] if arguments else ""
    if command in ("-h", "--help", "help"):
        print(USAGE, end="")
        return 0
    if command == "--version":
        print(f"dflash-server {_version()}")
        return 0
    if not command:
        print(USAGE, end="", file=sys.stderr)
        return 2
    commands = {"serve": serve, "check": check, "npu-report": npu_report, "bench": bench}
    if command not in commands:
        return _fail(f"unknown command {command}", f"did you mean `dflash-server serve {' '.join(arguments)}`?")
    # torch_npu without CANN breaks a plain `import torch` in every process that loads device backends by itself;
    # the NPU backend imports torch_npu by name.
    os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    return commands[command](arguments[1:])


def check(arguments: Sequence[str]) -> int:
    """Probe a device of this machine and print what was found: 0 if nothing failed, 1 if something did."""
    from app.config.settings import Config, ConfigError, Said

    parser = _Parser(prog="dflash-server check", description=check.__doc__, allow_abbrev=False)
    parser.add_argument("--device", help="auto | cpu | cuda | cuda:N | npu | npu:N [default: auto, DFLASH_DEVICE]")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    try:
        given = parser.parse_args(arguments)
        device = Config.load([Said("--device", "device", given.device)] if given.device else []).device
    except ConfigError as error:
        return _fail(str(error), error.hint)

    from app.doctor.check import report

    return report(device, as_json=given.json)


def npu_report(arguments: Sequence[str]) -> int:
    """Run every operator, the open points and the demo pair on an NPU of this host, time them, and write what came out
    to npu-report.json and npu-report.md. Nothing leaves the host. 0 if nothing failed, 1 if something did."""
    from app.config.settings import Config, ConfigError, Said

    parser = _Parser(prog="dflash-server npu-report", description=npu_report.__doc__, allow_abbrev=False)
    parser.add_argument("--device", default="npu", help="npu | npu:N [default: npu]")
    parser.add_argument(
        "--out", metavar="FOLDER", type=Path, default=Path(), help="where both files go [default: here]"
    )
    try:
        given = parser.parse_args(arguments)
        device = Config.load([Said("--device", "device", given.device)]).device
        if not device.startswith("npu"):
            raise ConfigError(f"--device {device} is no NPU", "dflash-server check looks at other devices")
    except ConfigError as error:
        return _fail(str(error), error.hint)

    from app.doctor.report.npu_runner import report

    try:
        return report(device, given.out)
    except OSError as error:
        return _fail(f"--out {given.out}: {error.strerror or error}", "give a folder that this user may write to")


def bench(arguments: Sequence[str]) -> int:
    """Run a part of app.bench, which loads torch where it needs it."""
    sys.argv[1:] = arguments
    runpy.run_module("app.bench", run_name="__main__", alter_sys=True)
    return 0


def serve(arguments: Sequence[str]) -> int:
    """Settle the settings, find and check both checkpoints, and only then start the server."""
    from app.config.checkpoint import CheckpointError, check_files, resolve
    from app.config.settings import Config, ConfigError

    try:
        config = Config.load(parse_flags(arguments))
        check_torch_build(config.device)
        config.api_keys()
        draft_name = choose_draft(config)
        target = resolve(config.model, "target")
        check_files(target, need_tokenizer=True)
        draft = resolve(draft_name, "draft") if draft_name else None
        if draft:
            check_files(draft, need_tokenizer=False)
    except ConfigError as error:
        return _fail(str(error), error.hint)
    except CheckpointError as error:
        return _fail(str(error))
    if draft is None:
        why = "--no-speculation" if not config.speculation else "no --draft-model"
        print(f"{config.model} decodes plainly, without drafts: {why}", file=sys.stderr)

    from app.api.server import run

    return run(config, target, draft)


def choose_draft(config: "Config") -> str | None:
    """The draft to resolve. The demo target brings its own; None decodes plainly."""
    if not config.speculation:
        return None
    return config.draft_model or ("demo" if config.model == "demo" else None)


def check_torch_build(device: str) -> None:
    """Refuse an NPU that this Python environment cannot drive. Reads files only: nothing is imported.

    Raises ConfigError where `device` is an NPU, or `auto` on a machine that has one, and torch is a CUDA build or
    torch_npu is missing. Elsewhere a torch_npu that lies about is harmless.
    """
    installed = importlib.util.find_spec("torch_npu") is not None
    has_npu = any(Path("/dev").glob("davinci[0-9]*"))
    if not device.startswith("npu") and not (device == "auto" and installed and has_npu):
        return
    from app.config.settings import ConfigError

    if not installed:
        raise ConfigError(
            f"--device {device}: torch_npu is not installed",
            f"pip install 'dflash-server[npu]', on x86 with --extra-index-url {CPU_INDEX}",
        )
    version, cuda = _torch_build()
    if cuda:
        raise ConfigError(
            f"--device {device}: torch {version} is a CUDA {cuda} build, and torch_npu works with a CPU build only",
            f"pip install --index-url {CPU_INDEX} torch=={version.split('+')[0]}, or --device cuda",
        )


def _torch_build() -> tuple[str, str | None]:
    """(version, CUDA version or None) of the torch that is installed, from its version.py."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return "(none)", None
    text = (Path(spec.origin).parent / "version.py").read_text(encoding="utf-8")
    version = re.search(r"^__version__ = ['\"](.+?)['\"]", text, re.MULTILINE)
    cuda = re.search(r"^cuda\b[^=]*= ['\"](.+?)['\"]", text, re.MULTILINE)
    return version.group(1) if version else "(unknown)", cuda.group(1) if cuda else None


def parse_flags(arguments: Sequence[str]) -> "list[Said]":
    """What the flags of `serve` say, in their order. Raises ConfigError; `--help` and `--version` leave the process."""
    from app.config.settings import ConfigError, nearest

    parser = _serve_parser()
    namespace, unknown = parser.parse_known_args([_dashed(argument) for argument in arguments])
    if unknown:
        flag = next((argument for argument in unknown if argument.startswith("-")), None)
        if flag is None:
            raise ConfigError(f"unexpected argument {unknown[0]}", "only one MODEL can be served")
        name = flag.split("=")[0]
        hint = nearest(name, parser._option_string_actions) or "`dflash-server serve --help` lists all flags"
        raise ConfigError(f"unknown flag {name}", hint)
    return list(namespace.said)


def _dashed(argument: str) -> str:
    """`--max_num_seqs=8` -> `--max-num-seqs=8`: vLLM takes both."""
    if not argument.startswith("--"):
        return argument
    name, equals, value = argument.partition("=")
    return name.replace("_", "-") + equals + value


def _serve_parser() -> argparse.ArgumentParser:
    """A flag for every setting, and the peers' flags under their own heading."""
    from app.config.settings import GROUPS, PEER_FLAGS, setting_fields

    parser = _Parser(
        prog="dflash-server serve",
        usage="dflash-server serve [MODEL] [flags]",
        description="Flags win over DFLASH_* environment variables, and these over the YAML file of --config.",
        allow_abbrev=False,
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=32),
    )
    parser.set_defaults(said=[])
    fields = setting_fields()
    for title, names in GROUPS.items():
        group = parser.add_argument_group(title)
        for name in names:
            _add_setting(group, name, fields[name])
    group = parser.add_argument_group("flags of vLLM and SGLang that are understood too")
    for peer in PEER_FLAGS:
        ours = peer.ours or "nothing to set"
        note = f"; {peer.note}" if peer.note else ""
        nargs = 0 if peer.value in ("none", "off") else "?" if peer.value == "refused" else None
        text = f"{'refused' if peer.value == 'refused' else ours} ({peer.peers}){note}"
        group.add_argument(peer.flag, dest="said", action=_SayPeer, const=peer, nargs=nargs, metavar="VALUE", help=text)
    return parser


def _add_setting(group: Any, name: str, field: Any) -> None:
    from app.config.settings import env_name, flag_name, no_flag_name

    default = field.get_default(call_default_factory=True)
    shown = "" if default in (None, [], {}, "") else f"default: {str(default).lower()}, "
    text = f"{field.description} [{shown}{env_name(name)}]".replace("%", "%%")
    if name == "model":
        group.add_argument("said", nargs="?", action=_Say, const=name, metavar="MODEL", help=text)
    elif isinstance(default, bool):
        flags = [flag_name(name), no_flag_name(name)]
        group.add_argument(*flags, dest="said", nargs=0, action=_Say, const=name, help=text)
    else:
        metavar = METAVARS.get(name, "VALUE")
        nargs = "+" if isinstance(default, list) else None
        group.add_argument(
            flag_name(name), dest="said", nargs=nargs, action=_Say, const=name, metavar=metavar, help=text
        )


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        from app.config.settings import ConfigError

        raise ConfigError(message.removeprefix("argument "), f"`{self.prog} --help` lists all flags")


class _Say(argparse.Action):
    """Keep what was said and how it was spelt; `const` is the field."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        from app.config.settings import Said

        if option_string is None and (values is None or values == []):
            return  # argparse calls for a MODEL that was not given
        spelling = option_string or "MODEL"
        value = not spelling.startswith("--no-") if self.nargs == 0 else values
        namespace.said = [*namespace.said, Said(spelling, self.const, value)]


class _SayPeer(argparse.Action):
    """The same in a peer's words; `const` is the PeerFlag."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        from app.config.settings import ConfigError, PeerFlag, Said

        peer: PeerFlag = self.const
        if peer.value == "refused":
            raise ConfigError(f"{peer.flag} is refused: {peer.note}")
        if peer.value == "algorithm" and values.upper() != "DFLASH":
            raise ConfigError(f"{peer.flag} {values}: this server decodes with DFLASH only")
        if peer.value == "block":
            values = _drafts_of_block(peer.flag, values)
        if peer.field:
            value = {"none": True, "off": False}.get(peer.value, values)
            namespace.said = [*namespace.said, Said(peer.flag, peer.field, value)]


def _drafts_of_block(flag: str, block: str) -> int:
    """A block is the anchor and its drafts: 16 -> 15."""
    from app.config.settings import ConfigError

    if not block.isascii() or not block.isdigit() or len(block) > 9 or int(block) < 2:
        raise ConfigError(f"{flag} {block}: a block is a whole number of rows, the anchor and at least one draft")
    return int(block) - 1


def _version() -> str:
    from importlib.metadata import version

    return version("dflash-server")


def _fail(message: str, hint: str = "") -> int:
    print(f"error: {message}", file=sys.stderr)
    if hint:
        print(f"hint: {hint}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
