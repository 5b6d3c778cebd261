"""What these tests need is in an environment of its own: `make integrations-swift`."""

import importlib.util

# Where that is not installed they are not collected; nothing runs half of them.
collect_ignore_glob = [] if importlib.util.find_spec("swift") else ["test_*.py"]
