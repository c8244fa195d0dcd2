"""Target models, and what drafts share with them: layers, RoPE, experts, KV and recurrent states.

`target.py` has the base class, and `load/loader.py` finds that of a family. Shapes are read from config.json in
`engine/checkpoint`, operators are in `engine/device`, and the draft model is in `engine/dflash`.
"""
