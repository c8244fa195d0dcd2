"""/openapi.json says what the server does: schemathesis sends what it allows, and what it forbids."""

import hypothesis
import pytest
import schemathesis
from hypothesis import HealthCheck
from schemathesis import Case

from tests.costs import landing_ones
from tests.exhaustive.operations import CHECKS, OPERATIONS, TRIALS
from tests.fast.api.served import PATIENCE


@pytest.fixture(scope="module")
def operations(shared_server):
    """Every operation that the document describes, by method and path."""
    endless = [shared_server.ids("a")[0]] * 512  # for who ignores the stop token
    shared_server.script.plan(shared_server.ids("hello"), [*shared_server.ids(" world"), 2], endless)
    schema = schemathesis.openapi.from_url(f"{shared_server.url}/openapi.json", timeout=PATIENCE)
    return {operation.label: operation for operation in (found.ok() for found in schema.get_all_operations())}


@pytest.mark.parametrize("examples", landing_ones([20, 60], (20,)))
@pytest.mark.parametrize(("label", "mode"), TRIALS, ids=lambda value: getattr(value, "value", value))
def test_every_answer_is_as_described_and_none_is_a_server_error(operations, label, mode, examples):
    @hypothesis.settings(max_examples=examples, suppress_health_check=list(HealthCheck))
    @hypothesis.given(operations[label].as_strategy(generation_mode=mode))
    def answer_is_as_described(case: Case) -> None:
        response = case.call(timeout=PATIENCE)
        # A body that is too large is refused with 413 before it is read. Schemathesis counts that as accepted.
        too_large = response.status_code == 413
        checks = [check for check in CHECKS if not (too_large and check.__name__ == "negative_data_rejection")]
        case.validate_response(response, checks=checks)

    answer_is_as_described()


@pytest.mark.parametrize("field", ["messages", "prompt"])
def test_streams_are_as_described(operations, field):
    path = "/v1/chat/completions" if field == "messages" else "/v1/completions"
    asked = {"messages": [{"role": "user", "content": "hello"}], "prompt": "hello"}
    case = operations[f"POST {path}"].Case(body={field: asked[field], "stream": True}, media_type="application/json")
    assert "[DONE]" in case.call_and_validate(checks=CHECKS, timeout=PATIENCE).text


def test_every_operation_is_tried(operations):
    assert set(operations) == set(OPERATIONS)


def test_the_document_names_what_is_served_and_no_422(shared_server):
    document = shared_server.http.get("/openapi.json").json()
    assert {"/v1/chat/completions", "/v1/completions", "/v1/models", "/tokenize", "/ready"} <= set(document["paths"])
    operations = [operation for path in document["paths"].values() for operation in path.values()]
    assert not [operation for operation in operations if "422" in operation["responses"]]
    text = str(document["components"]["schemas"])
    assert "HTTPValidationError" not in text
    assert shared_server.http.get("/docs").status_code == 200
