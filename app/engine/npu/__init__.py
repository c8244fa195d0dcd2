"""Ascend backend. Apart from `app/check` no other folder imports torch_npu."""
