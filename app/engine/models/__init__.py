"""Target models. `registry` finds the class of a family; `layers` has what targets and drafts share."""
