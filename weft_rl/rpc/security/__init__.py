"""Who may call: credentials of both ends, the access rules, and the guard of a server."""
