"""Program of `helm test`: pushes a tiny adapter that changes nothing, asks the pool for it, and has
the pool forget it.

The adapter has rank 1 and is zero, of one layer of the model, whose names and shapes are read
from its config alone: no weight is loaded. The coordinator and the credentials come from WEFT_*.
"""

import argparse
import http.client
import json
import os
import re
import ssl
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

POLICY = "helm-test"


def linear_layer(model: str) -> tuple[str, int, int]:
    """Name, outputs and inputs of a layer of the model that vLLM can adapt."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        meta = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model))
    layers = {n: m for n, m in meta.named_modules() if isinstance(m, torch.nn.Linear)}
    for kind in ("o_proj", "q_proj", "down_proj"):
        for name, layer in layers.items():
            if name.endswith(f".{kind}"):
                return name, layer.out_features, layer.in_features
    raise SystemExit(f"{model} has no layer that this test knows to adapt: tests.enabled=false")


def make_adapter(path: Path, model: str) -> None:
    """Write a PEFT directory of one zero adapter of rank 1."""
    import torch
    from safetensors.torch import save_file

    name, outputs, inputs = linear_layer(model)
    prefix = f"base_model.model.{name}"
    tensors = {
        f"{prefix}.lora_A.weight": torch.zeros(1, inputs),
        f"{prefix}.lora_B.weight": torch.zeros(outputs, 1),
    }
    save_file(tensors, path / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": model,
        "r": 1,
        "lora_alpha": 1,
        "target_modules": [name],  # of this layer alone
        "bias": "none",
    }
    (path / "adapter_config.json").write_text(json.dumps(config))


def push(adapter: Path, timeout: float) -> str:
    """Push it as any trainer would; returns the version, for example ``helm-test@3``."""
    command = [sys.executable, "-m", "weft_rl", "push", str(adapter), f"--policy={POLICY}"]
    command += [f"--trainer-id={POLICY}", f"--timeout={timeout}", f"--connect-seconds={timeout}"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    print(done.stdout, end="", flush=True)
    version = re.search(rf"\b{POLICY}@\d+", done.stdout)
    if done.returncode or version is None:
        raise SystemExit("the push failed; the line above says why")
    return version[0]


def forget() -> None:
    """End the policy: a test leaves nothing that replicas must have to be ready."""
    command = [sys.executable, "-m", "weft_rl", "forget", POLICY]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    print(done.stdout, end="", flush=True)
    if done.returncode:
        raise SystemExit(f"{POLICY} is not forgotten; the line above says why")


class OpenAI:
    """The pool's OpenAI API, as a client sees it."""

    def __init__(self, url: str, ca: str | None) -> None:
        self._url = url
        self._tls = ssl.create_default_context(cafile=ca) if url.startswith("https") else None

    def call(self, path: str, body: dict[str, object] | None, until: float) -> dict:
        """Its answer; waits for a replica that is ready, until a time of the monotonic clock."""
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get("OPENAI_API_KEY"):
            headers["Authorization"] = f"Bearer {key}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self._url}{path}", data, headers)
        while True:
            try:
                with urllib.request.urlopen(request, timeout=60, context=self._tls) as answer:
                    return json.load(answer)
            except urllib.error.HTTPError as error:
                if error.code != 503 or time.monotonic() > until:
                    text = error.read().decode(errors="replace")
                    raise SystemExit(f"{path} answered {error.code}: {text}") from None
            except (OSError, http.client.HTTPException) as error:
                # Of an answer that is late or cut off urllib makes no URLError.
                if time.monotonic() > until:
                    why = getattr(error, "reason", error)
                    raise SystemExit(f"{self._url} does not answer: {why}") from None
            time.sleep(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--openai", required=True, help="URL of the pool's OpenAI API")
    parser.add_argument("--openai-ca", help="PEM file that its certificate is verified by")
    parser.add_argument("--timeout", type=float, default=600, help="of all of it, in seconds")
    parser.add_argument("--without-adapter", action="store_true", help="ask the base only")
    args = parser.parse_args()

    until = time.monotonic() + args.timeout
    openai = OpenAI(args.openai, args.openai_ca)
    names = [model["id"] for model in openai.call("/v1/models", None, until)["data"]]
    print("the pool serves", ", ".join(names), flush=True)
    asked = names[0]
    if not args.without_adapter:
        with tempfile.TemporaryDirectory() as path:
            make_adapter(Path(path), args.model)
            asked = push(Path(path), max(1.0, until - time.monotonic()))
    question = {"model": asked, "prompt": "1", "max_tokens": 4}
    try:
        answer = openai.call("/v1/completions", question, until)
        if answer["model"] != asked:
            raise SystemExit(f"asked for {asked}, answered by {answer['model']}")
        print(f"asked for {asked}, and it answered", flush=True)
    finally:
        if not args.without_adapter:
            forget()


if __name__ == "__main__":
    main()
