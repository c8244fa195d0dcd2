"""The target's choice of a token after each row: greedy, or by temperature, filters, penalties, biases and seeds.

The meaning of a request's fields for rows is in `step/sampling_rows.py`, and acceptance of drafts in `verify.py`.
"""
