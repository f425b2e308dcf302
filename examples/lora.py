"""LoRA adapters (pip install -e '.[hf]' peft) on a small GPT-2, trained on two ranks.

The base model is frozen: it has no gradients, no optimizer state and no exchange, and a plan knows.
This file is both the model and the training script:

    planner search examples/lora.py --gpus 2 --global-batch 8
    planner verify plan.json examples/lora.py
    planner launch plan.json examples/lora.py
"""

import hf_gpt2
import peft
import torch

STEPS = 30


def model():
    config = peft.LoraConfig(
        r=8,
        lora_alpha=16,
        target_modules=["c_attn", "c_proj"],
        fan_in_fan_out=True,
        task_type="CAUSAL_LM",
    )
    return peft.get_peft_model(hf_gpt2.model(), config)


batch = hf_gpt2.batch


def main():
    import planner

    torch.manual_seed(0)
    network = model()
    adapters = [param for param in network.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(adapters, lr=1e-2)
    engine = planner.apply("plan.json", network, optimizer=optimizer)
    same = batch(8)
    for step in range(STEPS):
        loss = engine.step(same)
        if torch.distributed.get_rank() == 0:
            print(f"step {step}: loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
