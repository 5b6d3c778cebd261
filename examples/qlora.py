"""QLoRA: a base of 4 bits by bitsandbytes; its adapter, or that base with it merged in.

    weft coordinator
    weft rollout -- tiny --enable-lora --max-lora-rank 8
    python examples/qlora.py --model tiny [--merged]

An adapter is served on the replicas' own base, which lacks the error of the 4 bits that
it was trained with; `--merged` pushes the dequantised base with the adapter in it, so that
the replicas compute what the trainer does.

On a GPU: the same with a real model's name in both places. examples/README.md has vLLM's
settings for a CPU.
"""

import argparse

import torch
from openai import OpenAI
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from trainer_side import Publisher


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a LoRA on 4 bits and push it.")
    parser.add_argument("--model", default="tiny", help="what the replicas serve")
    parser.add_argument("--policy", default="math", help="the adapter's name in the pool")
    parser.add_argument("--merged", action="store_true", help="push the base with it merged in")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--coordinator", default="127.0.0.1:50051", help="HOST:PORT")
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="of any replica")
    args = parser.parse_args()

    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(
        args.model,
        dtype=torch.bfloat16,
        device_map=device,
        quantization_config=BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16
        ),
    )
    model = get_peft_model(
        model, LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM")
    )
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2)

    # The pool may be starting beside this job: wait for its coordinator.
    with Publisher(args.coordinator, trainer_id="qlora-example", connect_seconds=300) as publisher:
        for _ in range(args.steps):
            # Made up; your rollouts and your loss go here.
            ids = torch.randint(model.config.vocab_size, (4, 32), device=device)
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

            if args.merged:
                version, report = publisher.push_merged(model)
            else:
                version, report = publisher.push_adapter(model, args.policy)
            print(f"loss {loss.item():.3f}, pushed {version}")
        for remark in report.remarks:
            print(f"remark: {remark}")

    client = OpenAI(base_url=f"{args.url}/v1", api_key="none")
    # Adapters go by their versions, a base by the name that it has in /v1/models.
    name = client.models.list().data[0].id if args.merged else str(version)
    answer = client.completions.create(
        model=name, prompt="Two and two is", max_tokens=8, temperature=0
    )
    print(f"asked for {name}: {answer.model} says {answer.choices[0].text!r}")


if __name__ == "__main__":
    main()
