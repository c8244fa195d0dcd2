"""Settings: what may be set, where values come from, and how a wrong one is refused. Nothing here imports torch.

What a checkpoint's config.json says is read in `app.engine.checkpoint`, and what a request may say is in `app.api`.
"""
