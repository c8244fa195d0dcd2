"""CUDA GPUs: kernels in Triton, graphs, and probes of the host for `check`.

The kernels are compared with PyTorch's in Triton's interpreter and compiled for sm_90, and ran on one H200. What all
devices share is in engine/device, and the models that call these operators are in engine/models and engine/dflash.
"""
