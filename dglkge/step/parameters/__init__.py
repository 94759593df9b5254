"""Parameters beside the rows of tables, of which every trainer has a copy or a slice."""
