"""`bench gpu-report`: everything that only a GPU can tell about the CUDA backend."""

from app.doctor.report.cuda.report import main

__all__ = ["main"]
