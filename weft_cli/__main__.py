"""``python -m weft_cli``."""

from weft_cli.main import run

run()
