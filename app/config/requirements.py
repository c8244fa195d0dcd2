"""What settings require of each other, of this host's packages and of files, checked before anything is loaded."""

import os
from importlib.util import find_spec

from app.config.error import ConfigError
from app.config.settings import Config

OTLP_PROTOCOL = "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"
"""OpenTelemetry's variable, which vLLM reads too."""


def check_settings(config: Config) -> None:
    """Raise ConfigError for settings that exclude each other, or that need a file or a package that is not here."""
    if config.engine.cache_events and not config.engine.prefix_caching:
        raise ConfigError("--kv-events-config publishes how the prefix cache changes: drop --no-prefix-caching")
    config.api_keys()
    if config.otlp_traces_endpoint is None:
        return
    try:
        exporter = find_spec(f"opentelemetry.exporter.otlp.proto.{otlp_protocol().removesuffix('/protobuf')}")
    except ModuleNotFoundError:
        exporter = None
    if exporter is None:
        raise ConfigError("--otlp-traces-endpoint needs OpenTelemetry", "pip install '.[otlp]' in the source tree")
    if config.otlp_traces_endpoint.startswith("grpc:") and otlp_protocol() != "grpc":
        raise ConfigError(f"--otlp-traces-endpoint: {OTLP_PROTOCOL}={otlp_protocol()} needs an http:// address")


def otlp_protocol() -> str:
    """Return the protocol to a collector of traces, by OpenTelemetry's variable. Raises ConfigError for another."""
    protocol = os.environ.get(OTLP_PROTOCOL, "grpc")
    if protocol not in ("grpc", "http/protobuf"):
        raise ConfigError(f"{OTLP_PROTOCOL}={protocol}: --otlp-traces-endpoint is grpc or http/protobuf")
    return protocol
