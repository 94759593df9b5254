"""A page about runs: figures collected from their files, and the HTML that shows them."""
