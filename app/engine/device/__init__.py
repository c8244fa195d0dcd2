"""What a device can do, and the one place that opens one: base.py is the interface, torch.py the reference, factory.py
makes a backend by name.

Also here: maths that several devices share (the delta rule, mixtures of experts), copies and memory. Code for one
device is in cpu/, cuda/ or npu/, whose docstrings list what has not run on hardware.
"""
