"""Compiled loops: the one door to numba."""
