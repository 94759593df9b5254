"""An explorer of a trained model on the local machine: a page, and REST beside it."""
