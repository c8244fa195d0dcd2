"""Checkpoints of the settings: found, downloaded if need be, and checked before anything is loaded."""

import os
import sys
from importlib.util import find_spec
from pathlib import Path

from app.config.checkpoint import check_files, check_length, resolve
from app.config.error import ConfigError
from app.config.settings import Config
from app.config.tensor_headers import check_draft_tensors, check_target_tensors
from app.config.torch_build import check_torch_build

OTLP_PROTOCOL = "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"
"""OpenTelemetry's variable, which vLLM reads too."""


def find_models(config: Config) -> tuple[Path, Path | None]:
    """Return the folders of target and draft. Raises ConfigError for settings or files that cannot be used."""
    check_torch_build(config.device)
    check_settings(config)
    return find_checkpoints(config)


def check_settings(config: Config) -> None:
    """Raise ConfigError for settings that exclude each other, or that need a file or a package that is not here."""
    config.for_engine(Path(), None)
    config.api_keys()
    if config.otlp_traces_endpoint is None:
        return
    try:
        exporter = find_spec(f"opentelemetry.exporter.otlp.proto.{otlp_protocol().removesuffix('/protobuf')}")
    except ModuleNotFoundError:
        exporter = None
    if exporter is None:
        raise ConfigError("--otlp-traces-endpoint: OpenTelemetry is not installed", "pip install 'dflash-server[otlp]'")
    if config.otlp_traces_endpoint.startswith("grpc:") and otlp_protocol() != "grpc":
        raise ConfigError(f"--otlp-traces-endpoint: {OTLP_PROTOCOL}={otlp_protocol()} needs an http:// address")


def otlp_protocol() -> str:
    """Return the protocol to a collector of traces, by OpenTelemetry's variable. Raises ConfigError for another."""
    protocol = os.environ.get(OTLP_PROTOCOL, "grpc")
    if protocol not in ("grpc", "http/protobuf"):
        raise ConfigError(f"{OTLP_PROTOCOL}={protocol}: --otlp-traces-endpoint is grpc or http/protobuf")
    return protocol


def find_checkpoints(config: Config) -> tuple[Path, Path | None]:
    """Return the folders of target and draft. Raises CheckpointError for files that cannot be used."""
    target = resolve(config.model, "target")
    check_files(target, need_tokenizer=True)
    check_length(target, config.max_model_len)
    check_target_tensors(target)
    draft_name = config.draft_model or ("demo" if config.model == "demo" else None)
    if not (config.speculation and draft_name):
        reason = "no --draft-model" if config.speculation else "--no-speculation"
        print(f"{config.model} decodes plainly, without drafts: {reason}", file=sys.stderr)
        return target, None
    draft = resolve(draft_name, "draft")
    check_files(draft, need_tokenizer=False)
    check_draft_tensors(draft, target)
    return target, draft
