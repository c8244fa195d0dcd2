"""CUDA GPUs: kernels in Triton, graphs, which launches are timed at startup, and probes of the host for `check`.

The kernels are compared with PyTorch's in Triton's interpreter and compiled for sm_90; none was run on a GPU. What all
devices share is in engine/device, and the models that call these operators are in engine/models and engine/dflash.
"""
