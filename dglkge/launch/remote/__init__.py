"""Machines of a job: their sites, nodes without SSH, and the files that travel."""
