"""Access control: credentials of both ends, the access rules, and the guard of a server."""
