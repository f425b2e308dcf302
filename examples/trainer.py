"""A Hugging Face Llama trained by a Trainer, whose ranks are those of a plan.

This file is both the model and the training script (pip install -e '.[hf]'):

    planner search examples/trainer.py --gpus 2 --global-batch 8
    planner launch plan.json examples/trainer.py
    python examples/trainer.py              # the same by transformers.Trainer, in one process
"""

import os

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

VOCABULARY, SEQUENCE, SAMPLES, BATCH = 256, 32, 64, 8


def model():
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            max_position_embeddings=SEQUENCE,
            hidden_size=64,
            intermediate_size=192,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
        )
    )


def batch(size):
    tokens = torch.randint(VOCABULARY, (size, SEQUENCE))
    return {"input_ids": tokens, "labels": tokens}


class Counting(torch.utils.data.Dataset):
    """Bytes that count up, from a beginning of their own."""

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        tokens = (torch.arange(SEQUENCE) + 3 * index) % VOCABULARY
        return {"input_ids": tokens, "labels": tokens}


def arguments(replicas):
    return TrainingArguments(
        output_dir="out",
        per_device_train_batch_size=BATCH // replicas,
        num_train_epochs=10,
        learning_rate=2e-3,
        train_sampling_strategy="sequential",
        logging_steps=16,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
    )


def main():
    data = {"train_dataset": Counting(), "eval_dataset": Counting()}
    if "WORLD_SIZE" not in os.environ:
        trainer = Trainer(model(), arguments(1), **data)
    else:
        from planner.integrations.huggingface import PlannerTrainer
        from planner.language.plan import load_plan

        plan = load_plan("plan.json")
        trainer = PlannerTrainer(model(), arguments(plan.batch_parts), plan=plan, **data)
    trainer.train()
    evaluated = trainer.evaluate()
    if trainer.is_world_process_zero():
        print("evaluation:", evaluated["eval_loss"])
    trainer.save_model("out")


if __name__ == "__main__":
    main()
