"""The commands that run a server until it is told to stop: the coordinator, a replica."""
