"""The layout of parameters: which elements are on which rank, and where in a buffer. Integers only, no torch."""
