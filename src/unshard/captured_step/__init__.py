"""Training steps that are recorded once as a CUDA graph and then replayed, without running any Python code."""

from .step import CapturedStep, capture

__all__ = ["CapturedStep", "capture"]
