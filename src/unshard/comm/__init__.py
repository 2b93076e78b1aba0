"""The only callers of collectives."""
