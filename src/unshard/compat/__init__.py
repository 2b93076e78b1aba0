"""Our names under the places where programs written for PyTorch look for them. Names only."""
