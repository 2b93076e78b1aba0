"""Finds, without gathering, the boxes that this rank holds of each named tensor of a model and its optimizer."""
