"""The flags of `dflash-server serve`: one for every setting, and the flags of other projects."""

import argparse
from collections.abc import Sequence
from itertools import groupby
from typing import Any, get_args

from app.config.aliases import PEER_FLAGS
from app.config.engine import CHAT, ENGINE, LOGS, MODEL, SERVER, SPECULATION
from app.config.parser import Parser
from app.config.settings import env_name, flag_name, no_flag_name
from app.config.sources import SETTINGS, GivenSetting

GROUPS = (MODEL, SPECULATION, ENGINE, CHAT, SERVER, LOGS)


def parse_flags(arguments: Sequence[str]) -> list[GivenSetting]:
    """Return the settings that the flags of `serve` give, in their order. `field` is "" if a flag sets nothing.

    `--help` prints the help and leaves the process. Raises ConfigError.
    """
    words = _with_value([_dashed(argument) for argument in arguments])
    return list(serve_parser().parse_args(words).given)


def serve_parser() -> Parser:
    """Return the parser of `serve`. It collects GivenSettings in `namespace.given`."""
    parser = Parser(
        prog="dflash-server serve",
        usage="dflash-server serve [MODEL] [flags]",
        description="Flags win over DFLASH_* environment variables, and these over the YAML file of --config.",
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=32),
    )
    parser.set_defaults(given=[])
    groups = {title: parser.add_argument_group(title) for title in GROUPS}
    for name, field in SETTINGS.items():
        _add_setting(groups[field.json_schema_extra["group"]], name, field)
    group = parser.add_argument_group(
        "flags of vLLM, SGLang and llama-server that are understood too",
        "Others that set nothing, or are refused with a reason, are in docs/migrating.md.",
    )
    for peer in PEER_FLAGS:
        options: dict[str, Any] = {"dest": "given", "const": peer, "metavar": "VALUE", "action": _PeerAction}
        shown = f"{peer.ours}; {peer.note}" if peer.note else peer.ours
        options["help"] = shown if peer.field else argparse.SUPPRESS
        for nargs, names in groupby(sorted(peer.names, key=lambda name: str(peer.nargs(name))), peer.nargs):
            group.add_argument(*names, nargs=nargs, **options)
    return parser


def _dashed(argument: str) -> str:
    """Return `--max-num-seqs=8` for `--max_num_seqs=8`, because vLLM takes both."""
    if not argument.startswith("--"):
        return argument
    name, equals, value = argument.partition("=")
    return name.replace("_", "-") + equals + value


def _with_value(arguments: Sequence[str]) -> list[str]:
    """Return `-fa=on` for a bare `-fa`. The next word may be the MODEL if it is not one of its values."""
    bare = {"-fa", "--flash-attn"}
    return [
        f"{argument}=on" if argument in bare and following not in ("on", "off", "auto") else argument
        for argument, following in zip(arguments, [*arguments[1:], ""], strict=False)
    ]


def _add_setting(group: Any, name: str, field: Any) -> None:
    default = field.get_default(call_default_factory=True)
    shown = "" if default in (None, [], {}, "") else f"default: {str(default).lower()}, "
    options: dict[str, Any] = {
        "dest": "given",
        "action": _SettingAction,
        "const": name,
        "help": f"{field.description} [{shown}{env_name(name)}]".replace("%", "%%"),
    }
    if name == "model":
        group.add_argument(nargs="?", metavar="MODEL", **options)
    elif bool in (field.annotation, *get_args(field.annotation)):
        group.add_argument(flag_name(name), no_flag_name(name), nargs=0, **options)
    else:
        options["metavar"] = field.json_schema_extra.get("metavar", "VALUE")
        group.add_argument(flag_name(name), nargs="+" if isinstance(default, list) else None, **options)


class _SettingAction(argparse.Action):
    """Collect a setting and its spelling. `const` is the field."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        if option_string is None and (values is None or values == []):
            return  # argparse calls for a MODEL that was not given
        spelling = option_string or "MODEL"
        value = not spelling.startswith("--no-") if self.nargs == 0 else values
        namespace.given = [*namespace.given, GivenSetting(spelling, self.const, value)]


class _PeerAction(argparse.Action):
    """Collect what another project's flag means, or why it is refused. `const` is the PeerFlag."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        peer, name = self.const, str(option_string)
        if fault := peer.fault(name, values):
            parser.faults.append(fault)
        elif peer.kind != "only":
            value = " ".join(values) if isinstance(values, list) else values
            spelling = f"{name} {value}" if peer.kind == "taken" and value else name
            namespace.given = [*namespace.given, GivenSetting(spelling, peer.field, peer.read(values))]
