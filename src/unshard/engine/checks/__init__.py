"""What the engine refuses and explains; nothing here is on the hot path."""
