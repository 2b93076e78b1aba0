"""Process groups, the collectives of forward and backward, and the order check."""
