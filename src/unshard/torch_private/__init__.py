"""Every private torch API that this library needs, with the reason and the torch versions that have it.

"All versions" are the supported ones; checked with torch 2.11 (CUDA) and 2.13 (CPU).
"""

from .autograd import *
from .checkpoints import *
from .distributed import *
from .graphs import *
from .optimizers import *
from .tensors import *
