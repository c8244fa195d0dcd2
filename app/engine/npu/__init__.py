"""Ascend backend. No other folder imports torch_npu."""
