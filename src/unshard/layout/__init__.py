"""Which elements of which parameter are on which rank, and where they are in a buffer: integers only, no torch."""
