"""The operations that /openapi.json describes, and what schemathesis asks of their answers."""

from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
)

OPERATIONS = [
    "POST /v1/chat/completions",
    "POST /v1/completions",
    "POST /v1/chat/completions/render",
    "POST /v1/completions/render",
    "POST /v1/responses",
    "GET /v1/responses/resp_{key}",
    "DELETE /v1/responses/resp_{key}",
    "POST /tokenize",
    "POST /detokenize",
    "POST /reset_prefix_cache",
    "GET /v1/models",
    "GET /v1/models/{name}",
    "GET /version",
    "GET /server_info",
    "GET /model_info",
    "GET /get_load",
    "GET /ready",
    "GET /health",
    "GET /live",
    "GET /metrics",
]
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    negative_data_rejection,
]
TRIALS = [(label, GenerationMode.POSITIVE) for label in OPERATIONS]
BODILESS = {"POST /reset_prefix_cache"}
TRIALS += [
    (label, GenerationMode.NEGATIVE) for label in OPERATIONS if label.startswith("POST") and label not in BODILESS
]
