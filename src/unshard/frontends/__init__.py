"""Translate what users write into units; hold no state of their own."""
