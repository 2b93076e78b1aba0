"""All private torch APIs that this library uses, each with the reason and the torch versions that have it.

"All versions" are the supported ones, 2.11 to 2.15, checked with torch 2.11 (CUDA), 2.13 and 2.15 (CPU). "No public
way" means that torch has no public API for the purpose.
"""

from . import versions as versions  # first: checks the version before anything else can fail
from .autograd import *
from .distributed import *
from .optimizers import *
from .tensors import *
