"""Limits of the NPU operators that the backend and the contract checker share. docs/npu-contract.md has the sources."""

MAX_REQUESTS = 4096
MAX_BLOCK_ROWS = 16
MASK_SIZE = 2048
EVERY_TOKEN = 2**31 - 1
PAGE_SIZE = 128
MIN_EXPERTS = 2
MAX_TOP_K = 1024
MAX_AXIS = 65535
"""Numbers in a row of an expert's weights."""
HEAD_DIMS = (64, 128)
SCRATCH_BLOCK = 0
"""First block of padding requests, which may have more rows than a DFlash block."""
