"""`python -m tools.report --device npu|cuda`: measurements that only a device can give, and a page of them.

Each section of a report runs in a separate process. Nothing leaves the host, and no prompt, user name or host name is
written.
"""
