"""LoRA by PEFT in one process: each step's adapter is a version that any client can ask for.

    weft coordinator
    weft rollout -- tiny --enable-lora --max-lora-rank 8
    python examples/lora.py --model tiny

On a GPU: the same with a real model's name in both places, for example Qwen/Qwen3-8B. On a
CPU: `python examples/tiny_model.py tiny` first, and vLLM's settings of examples/README.md.
"""

import argparse

import torch
from openai import OpenAI
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from trainer_side import Publisher


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a LoRA and push it after each step.")
    parser.add_argument("--model", default="tiny", help="what the replicas serve")
    parser.add_argument("--policy", default="math", help="the adapter's name in the pool")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--coordinator", default="127.0.0.1:50051", help="HOST:PORT")
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="of any replica")
    args = parser.parse_args()

    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype="auto").to(device)
    model = get_peft_model(
        model, LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM")
    )
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2)
    client = OpenAI(base_url=f"{args.url}/v1", api_key="none")

    # The pool may be starting beside this job: wait for its coordinator.
    with Publisher(args.coordinator, trainer_id="lora-example", connect_seconds=300) as publisher:
        for _ in range(args.steps):
            # Made up; your rollouts and your loss go here.
            ids = torch.randint(model.config.vocab_size, (4, 32), device=device)
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

            # Returns once every replica serves it; str(version) is "math@1", for example.
            version = publisher.push_adapter(model, args.policy).version
            print(f"loss {loss.item():.3f}, pushed {version}")

            # This version, whatever is pushed meanwhile.
            ask(client, str(version))

    ask(client, args.policy)  # the newest one; the answer says which that was


def ask(client: OpenAI, name: str) -> None:
    answer = client.completions.create(
        model=name, prompt="Two and two is", max_tokens=8, temperature=0
    )
    print(f"asked for {name}: {answer.model} says {answer.choices[0].text!r}")


if __name__ == "__main__":
    main()
