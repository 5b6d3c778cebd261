"""What the chart's tests need is in an environment of its own: `make chart`."""

import importlib.util

# Where that is not installed they are not collected; nothing runs half of them.
collect_ignore_glob = [] if importlib.util.find_spec("kubernetes_validate") else ["test_*.py"]
