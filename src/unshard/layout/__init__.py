"""Which elements of which parameter lie on which rank: integers only, no torch."""
