"""gpt-oss (arXiv 2508.10925): gpt-oss-20b, gpt-oss-120b."""

from app.engine.models.target import Target
from app.engine.models.weights import ExpertLayout


class GptOss(Target):
    """Decoder with a sink for each head, and experts with biases and clipped SwiGLU. Sliding and full layers alternate.

    Experts are stored in mxfp4, or as [E, in, out] in 16 bits. Rows of gate and up alternate.
    """

    expert_layout = ExpertLayout("router", interleaved=True, input_first=True)
