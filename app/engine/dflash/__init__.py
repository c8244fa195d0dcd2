"""DFlash: block-diffusion drafting (arXiv 2602.06036). config, model, context_kv, drafter, policy."""
