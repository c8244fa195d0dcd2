"""Sections of `report --device cuda` about this server's own work: texts from graphs, speeds, kernels and attention.

The report starts them by name, and only a source tree has them: `python -m tools.lab.gpu NAME OPTIONS SKIP SECONDS`.
"""

import sys

from tools.report.section import main

MAKERS = {
    "equality": "tools.lab.equality.parts",
    "speeds": "tools.lab.speeds.parts",
    "prefill": "tools.lab.cuda_attention.prompts_parts",
    "attention": "tools.lab.cuda_attention.launches_parts",
    "gemm": "tools.lab.gemms.parts",
    "turns": "tools.lab.turns.parts",
    "graphs": "tools.lab.kernels.graph_parts",
    "profile": "tools.lab.kernels.profile_parts",
}

if __name__ == "__main__":
    main(sys.argv[1:], MAKERS)
