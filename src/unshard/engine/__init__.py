"""Unshards units while they compute and reduces their gradients. Knows no front-end."""
