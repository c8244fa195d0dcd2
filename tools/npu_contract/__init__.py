"""Checker of operator calls on an NPU against docs/npu-contract.md: check.py has the rules, `__main__.py` runs a model.

The tests on the stub libraries hold every call to the same rules (tests/devices/npu/numerics.py).
"""
