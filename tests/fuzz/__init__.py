"""Generated requests against live services: see ``tests.fuzz.run``."""
