"""Benches that compare: variants interleaved on one machine until their ratio is known."""
