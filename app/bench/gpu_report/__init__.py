"""`bench gpu-report`: everything that only a GPU can tell about the CUDA backend."""

from app.bench.gpu_report.report import main

__all__ = ["main"]
