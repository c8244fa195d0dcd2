"""The NumPy arrays that a step is made of on the host."""

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int32]
Floats = NDArray[np.float32]
