"""Names and layouts of other programs: PyTorch-BigGraph's operators, parameters, files; DGL-KE's models."""
