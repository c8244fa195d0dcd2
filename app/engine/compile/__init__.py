"""`--compile` on a CPU in float32: forwards traced by torch.export, built by g++, and kept on disk.

The process that compiles while the engine serves is `engine/compiler.py`. What loads an engine is in `load`.
"""
