"""Sequences of the next step and their effect: the scheduler, its KV pages, state slots, prefix cache and policy.

No torch: a `Batch` goes out and a `StepResult` comes in. Arrays of a batch are made in `step`, memory of pages and
slots is in `models`, and failed steps are handled in `faults.py`.
"""
