"""The trainer keeps the best weights, flashckpt resumes.

    python examples/transformers/train.py OUT [--steps 40]

Kill it and run the same line again: it continues at the next step, with the same result as an uninterrupted
training. OUT/trainer has one folder with the best weights, for from_pretrained; OUT/run is the run.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

import flashckpt.transformers


class Counting(Dataset):
    """Sequences that count from a random number."""

    def __init__(self, number: int, seed: int) -> None:
        begins = torch.randint(0, 16, (number, 1), generator=torch.Generator().manual_seed(seed))
        self.ids = (begins + torch.arange(8)) % 24

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=40)
    given = parser.parse_args()

    set_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=24, n_positions=8, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=1
        )
    )
    args = TrainingArguments(
        output_dir=str(given.out / "trainer"),
        max_steps=given.steps,
        learning_rate=1e-2,
        eval_strategy="steps",
        eval_steps=5,
        logging_steps=5,
        save_strategy="best",  # only the best weights, without the state for a resume
        metric_for_best_model="loss",
        save_only_model=True,
        save_total_limit=1,
        load_best_model_at_end=True,
        report_to=[],
        disable_tqdm=True,
    )
    trainer = Trainer(model, args, train_dataset=Counting(256, 1), eval_dataset=Counting(32, 2))
    flashckpt.transformers.train(trainer, given.out / "run")  # instead of trainer.train()
    print(f"step {trainer.state.global_step}, best loss {trainer.state.best_metric:.4f}")


if __name__ == "__main__":
    main()
