"""Behind a proxy that repeats no request, one that comes while the engine is loading waits for it."""

import pytest

from tests.fast.api.errors import TEXT, error_of
from tests.fast.api.served import PATIENCE, serving

BEARER = {"Authorization": "Bearer key"}


@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize"])
def test_a_request_waits_until_the_engine_is_ready_and_its_key_is_checked_before(model_folder, background, path):
    with serving(model_folder, hold_seconds=PATIENCE, api_key=["key"]) as server:
        held = background.submit(lambda: server.http.post(path, json=TEXT, headers=BEARER))
        assert server.http.post(path, json=TEXT).status_code == 401
        assert server.http.get("/v1/models", headers=BEARER).status_code in (200, 503)
        assert not held.done()
        server.script.see("started")
        server.script.plan([5, 2])
        server.script.order("ready", info=server.script.info)
        assert held.result().status_code == 200


def test_a_request_that_has_waited_long_enough_is_told_to_come_again(model_folder):
    with serving(model_folder, hold_seconds=0.05) as server:
        answer = server.http.post("/v1/completions", json=TEXT)
        assert error_of(answer, 503)["code"] == "engine_loading"
        assert int(answer.headers["Retry-After"]) > 0
