"""Ascend backend. Apart from the doctor no other folder imports torch_npu."""
