"""The operator's orders: as commands, about versions, and about replicas."""
