"""DFlash, block-diffusion drafting (arXiv 2602.06036): the draft model, its context KV, and the blocks it proposes.

The draft's config.json is read in `engine/checkpoint`, widths are chosen in `engine/schedule`, and drafts are verified
in `engine/verify.py`.
"""
