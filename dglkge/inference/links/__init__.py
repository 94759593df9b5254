"""Tables of a run in the files and models of other programs, and back."""
