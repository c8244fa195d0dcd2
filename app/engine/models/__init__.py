"""Target models. `registry` picks a class by the config's `model_type`; `layers` has what targets and drafts share."""
