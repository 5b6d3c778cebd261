"""Weft, a weight fabric for trainers: the code that both sides share."""

import os

__version__ = "0.1.0"

# gRPC reads it as it is imported. Left on, its handlers start gRPC's threads anew in each child
# that a process forks, a trainer's loader of data say, and there they abort it now and then.
# Nothing of Weft's is used in such a child.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
