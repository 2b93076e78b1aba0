"""Checks that all ranks issue the same collectives in the same order."""
