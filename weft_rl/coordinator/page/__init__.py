"""Web page of a pool: its files, and the lists of InspectService as JSON."""
