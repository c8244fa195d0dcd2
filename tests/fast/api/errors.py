"""Requests that are right, and the shape of an error."""

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
TEXT = {"model": "tiny", "prompt": "hi"}


def error_of(response, status):
    assert response.status_code == status, response.text
    assert set(response.json()) == {"error"}
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"] and response.headers["x-request-id"]
    return error


def refuses(server, path, base, refusal, values):
    """Check that each of these values of the refusal's field is refused by name and counted."""
    before = server.metric("request_refused_total", param=refusal.field)
    assert values
    outer, _, inner = refusal.field.partition(".")
    for value in values:
        fields = {outer: {inner: value}, "stream": True} if inner else {outer: value}
        error = error_of(server.http.post(path, json=base | fields), 400)
        assert (error["type"], error["param"]) == ("invalid_request_error", refusal.field)
        assert outer in error["message"] or refusal.field == "use_beam_search"
        assert "{}" not in error["message"] and error["message"].endswith(".")
    assert server.metric("request_refused_total", param=refusal.field) == before + len(values)
