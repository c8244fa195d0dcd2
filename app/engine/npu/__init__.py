"""The Ascend backend: torch_npu's operators, graphs with attention lengths that each replay updates, error codes, the
limits of its operators, and the probes of a host for `check`.

The interface is device/base.py, the rules of operator calls are docs/npu-contract.md, and their checker is
tools/npu_contract. No other room imports torch_npu. Checked against torch_npu's schemas, meta kernels and host checks
on a CPU; not run on an Ascend device.
"""
