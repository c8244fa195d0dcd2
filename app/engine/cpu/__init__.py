"""The CPU backend: PyTorch's operators in their cheapest forms, and C++ operators that g++ compiles at the first start.

The reference that it is held to is device/torch.py.
"""
