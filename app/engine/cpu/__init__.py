"""The CPU backend: C++ operators that g++ compiles at the first start, one of them for a whole forward, and PyTorch's.

The reference that it is held to is device/torch.py.
"""
