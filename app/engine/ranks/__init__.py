"""Processes that share one model: rank 0 sends each step to the others, which run it too.

Collectives between them are in `comm`. How models are divided is in `load` and `models`.
"""
