"""Kernels over all axes of a torus at once."""
