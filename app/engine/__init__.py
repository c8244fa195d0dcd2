"""The engine: token ids in, token ids out, by `core.EngineCore`. Text is in `app.text`, and HTTP in `app.api`."""
