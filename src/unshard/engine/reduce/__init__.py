"""From gradients to sharded gradients."""
