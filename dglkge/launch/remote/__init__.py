"""Machines of a job that are reached over SSH: agents, files, connections."""
