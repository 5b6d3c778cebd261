"""What these tests need is in an environment of its own: `make integrations-verl`."""

import importlib.util
import os

from tests.integrations.pool import ROOT

IS_INSTALLED = importlib.util.find_spec("verl") is not None
# Where that is not installed they are not collected; nothing runs half of them.
collect_ignore_glob = [] if IS_INSTALLED else ["test_*.py"]

if IS_INSTALLED:  # read when verl is imported, here and in the processes of Ray
    os.environ |= {
        "PYTHONPATH": str(ROOT),
        # verl's own interface of a platform, and its registry of engines, on a CPU.
        "VERL_PLATFORM": "cpu",
        "VERL_ENGINE_DEVICE": "cuda",
        "VERL_USE_EXTERNAL_MODULES": "tests.integrations.verl.cpu_platform",
        "RAY_AUTH_MODE": "disabled",
        "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
