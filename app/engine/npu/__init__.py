"""The Ascend backend: the only folder that imports torch_npu."""
