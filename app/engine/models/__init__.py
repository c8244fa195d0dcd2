"""Target models: one file each. `load_target` picks by the config's `model_type`."""
