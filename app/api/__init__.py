"""HTTP: OpenAI's endpoints, from a request's head to the last event of its answer.

Here are routes, bodies and their checks, answers, errors, layers of ASGI, and the server process. Chat templates,
tokens and parsers of output are in app/text. Requests go to the engine process through app/engine_client.
"""
