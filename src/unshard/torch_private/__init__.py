"""Every private torch API this library needs, in one place, with the reason and the versions that need it.

Checked with torch 2.11 (CUDA) and 2.13 (CPU).
"""

from .autograd import *
from .checkpoints import *
from .dtensors import *
from .groups import *
from .meshes import *
from .modules import *
from .optimizers import *
from .tensors import *
from .tracers import *
