"""Property tests have no time limit: the machine may be busy with anything."""

from hypothesis import settings

settings.register_profile("weft", deadline=None)
settings.load_profile("weft")
