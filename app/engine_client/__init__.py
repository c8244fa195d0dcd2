"""The API process's side of the engine: start it, watch it, send requests, read its deltas, admit and refuse.

No HTTP and no text belong here (those are `app.api` and `app.text`), and no model (`app.engine`). `app.wire` has what
the two processes send to each other.
"""
