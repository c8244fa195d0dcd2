"""The engine: token ids in, token ids out. It knows no text and no HTTP; `core.EngineCore` is the whole of it."""
