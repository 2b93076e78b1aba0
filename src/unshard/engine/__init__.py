"""Unshards units while they compute and reduces their gradients. Does not depend on any front-end."""
