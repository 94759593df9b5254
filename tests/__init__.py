"""Tests of dglkge; the folders mirror the package."""
