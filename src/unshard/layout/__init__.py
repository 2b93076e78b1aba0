"""Computes which elements of a parameter are on which rank, and where they are in a buffer.

This code uses only integers and does not import torch.
"""
