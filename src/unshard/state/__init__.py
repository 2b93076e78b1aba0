"""Finds the boxes of model and optimizer tensors that this rank holds, without gathering any tensor."""
