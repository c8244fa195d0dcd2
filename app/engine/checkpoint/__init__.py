"""Checkpoints: folders are found, files checked, and config.json read into the shapes that the engine is built from.

`read.py` is the way in. The API process calls it before anything is loaded, and the engine process calls it again on
the same folders, so nothing here imports torch. Weights are read in `engine/load`, and used in `engine/models`.
"""
