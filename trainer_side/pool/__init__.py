"""Pool as the sender of a trainer uses it: coordinator, leases, and the side group."""
