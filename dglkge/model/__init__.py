"""The mathematics: score functions, losses, regularizers and initial values. Torch and numpy only."""
