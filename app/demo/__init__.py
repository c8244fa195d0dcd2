"""The demo pair: a corpus, a tokenizer, a small Qwen3 target and its DFlash draft, all made by code in this folder.

`checkpoint/` is what `python -m tools.demo_pair.train` wrote. Nothing in the server imports
this package.
"""
