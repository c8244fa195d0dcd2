"""Benches that compare: several ways of doing the same, run by turns on the same machine, until the ratio is known."""
