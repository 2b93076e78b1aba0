"""Reductions: from gradients to sharded gradients."""
