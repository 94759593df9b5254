"""Memory, disk and time that a configuration needs. Numpy only; nothing is started."""
