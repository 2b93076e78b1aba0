"""A training step that is recorded once as a CUDA graph and then replayed: no Python runs in a replay."""

from .step import CapturedStep, capture

__all__ = ["CapturedStep", "capture"]
