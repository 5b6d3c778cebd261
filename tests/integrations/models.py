"""The tiny model of these tests."""

from __future__ import annotations

import json
from pathlib import Path

from tests.models import make_model


def make_chat_model(path: Path) -> Path:
    """Save a model whose tokenizer has a chat template: the contents of messages, as they are."""
    make_model("llama", path)
    config = path / "tokenizer_config.json"
    settings = json.loads(config.read_text())
    settings["chat_template"] = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    config.write_text(json.dumps(settings))
    return path
