"""DFlash, block-diffusion drafting (arXiv 2602.06036): the draft model, its context KV, the blocks it proposes,
and the check that a device has the attention for that.

The draft's config.json is read in `engine/checkpoint`, widths are chosen in `engine/schedule`, and drafts are verified
in `engine/verify.py`.
"""
