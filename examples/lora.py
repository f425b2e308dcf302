"""LoRA adapters (pip install -e '.[hf]' peft) on the Llama of examples/finetune.py.

The base model is frozen: it has no gradients, no optimizer state and no exchange, and a plan knows.
This file is both the model and the training script:

    python examples/finetune.py base
    planner search examples/lora.py --gpus 2 --global-batch 8
    planner verify plan.json examples/lora.py
    planner launch --keep run --save-every 20 plan.json examples/lora.py
                               # writes adapter/, for PeftModel.from_pretrained(base, "adapter")
"""

import finetune
import peft
import torch
from transformers import AutoModelForCausalLM

STEPS = 80


def model():
    config = peft.LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    return peft.get_peft_model(AutoModelForCausalLM.from_pretrained(finetune.BASE), config)


batch = finetune.batch


def main():
    import planner
    import training

    torch.manual_seed(0)
    network = model()
    adapters = [param for param in network.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(adapters, lr=1e-2)
    engine = planner.apply("plan.json", network, optimizer=optimizer)
    training.train(engine, optimizer, finetune.Text(), STEPS)
    values = engine.full_state_dict()
    if torch.distributed.get_rank() == 0:
        network.load_state_dict(values, assign=True)
        network.save_pretrained("adapter")


if __name__ == "__main__":
    main()
