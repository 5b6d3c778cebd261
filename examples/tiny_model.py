"""Makes a tiny random Qwen2 with a tokenizer, so that the examples run offline and on a CPU.

    python examples/tiny_model.py tiny

Its answers mean nothing. With a real model skip this: give its name or path instead.
"""

import sys
from pathlib import Path

from weft_rl.cli.demo.tiny_model import make_model

path = Path(sys.argv[1] if len(sys.argv) > 1 else "tiny")
make_model(path)
print(f"made {path}")
