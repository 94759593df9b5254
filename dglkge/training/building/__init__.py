"""What a trainer is built of: components and checks by configuration, and the first rows of a new run."""
