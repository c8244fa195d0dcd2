"""Requests that are running in the scripted engine."""

ASK = {"model": "tiny", "prompt": "hi"}


def started(server, background, **fields):
    """A request that is running in the engine, and its id there."""
    running = background.submit(lambda: server.http.post("/v1/completions", json=ASK | fields))
    return running, server.script.see("Submit")["request_id"]
