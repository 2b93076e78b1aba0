"""Policies: which modules inside a model become units of their own."""

from .frontends.wrap import *
from .frontends.wrap import __all__ as __all__
