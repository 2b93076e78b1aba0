"""The engine unshards units while they compute and reduces their gradients. It does not depend on any front-end."""
