"""Trainers of transformers and trl that train in about a second, and what of them has to be equal."""

import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"

import datasets
import numpy as np
import peft
import pytest
import torch
import trl
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.utils.data import DataLoader, Dataset, IterableDataset
from transformers import (
    EarlyStoppingCallback,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)  # fmt: skip
from transformers.trainer_callback import ExportableState

import flashckpt
import flashckpt.transformers
from flashckpt.transformers.training import OVERRIDDEN
from tests.integrations.job import (
    ACCUMULATION,
    BETWEEN,
    DRAW,
    EPOCH_END,
    SAVE,
    VALIDATION,
    Job,
    gradients,
    moment,
    random_numbers,
)  # fmt: skip
from tests.waiting import until

Make = Callable[[Path], Trainer]

WORDS = 24
# Of logged values, those that are times.
TIMES = ("runtime", "per_second", "elapsed", "step_time")


class Sentences(Dataset[dict[str, torch.Tensor]]):
    """With random augmentation by Python, NumPy and torch."""

    def __init__(self, number: int, augmented: bool = True) -> None:
        self.augmented = augmented
        self.ids = torch.randint(0, WORDS, (number, 8), generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = self.ids[index].clone()
        if self.augmented:
            moment(DRAW)
            ids[torch.randint(0, 8, ())] = random.randrange(WORDS)
            ids[np.random.randint(8)] = 7
        return {"input_ids": ids, "labels": ids.clone()}


class Stream(IterableDataset[dict[str, torch.Tensor]]):
    def __init__(self, number: int, augmented: bool = True) -> None:
        self.items = Sentences(number, augmented)

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        return (self.items[index] for index in range(len(self.items)))


def model() -> GPT2LMHeadModel:
    set_seed(0)
    config = GPT2Config(
        vocab_size=WORDS, n_positions=32, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=1
    )
    return GPT2LMHeadModel(config)


def options(folder: Path, **changed: Any) -> dict[str, Any]:
    return {
        "output_dir": str(folder / "out"), "per_device_train_batch_size": 4, "num_train_epochs": 2,
        "learning_rate": 1e-2, "logging_steps": 3, "report_to": [], "use_cpu": True, "seed": 0,
        "disable_tqdm": True, "save_strategy": "no", "lr_scheduler_type": "cosine", "warmup_steps": 3,
        "dataloader_pin_memory": False, **changed,
    }  # fmt: skip


def arguments(folder: Path, **changed: Any) -> TrainingArguments:
    return TrainingArguments(**options(folder, **changed))


def trainer_of(folder: Path, data: Any, callbacks: Any = None, **changed: Any) -> Trainer:
    """It evaluates where it is given a strategy for that."""
    held = Sentences(6, False) if "eval_strategy" in changed else None
    args = arguments(folder, **changed)
    return Trainer(model(), args, train_dataset=data, eval_dataset=held, callbacks=callbacks)


def lora() -> peft.LoraConfig:
    return peft.LoraConfig(r=2, target_modules=["c_attn"], lora_dropout=0.1, fan_in_fan_out=True)


def tokenizer() -> PreTrainedTokenizerFast:
    words = {"<pad>": 0, "<eos>": 1, "<unk>": 2, **{f"w{i}": 3 + i for i in range(WORDS - 3)}}
    made = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def texts(number: int, seed: int = 0) -> list[str]:
    chosen = random.Random(seed)
    return [
        " ".join(f"w{chosen.randrange(WORDS - 3)}" for _ in range(chosen.randrange(3, 8)))
        for _ in range(number)
    ]


# ---- trainers of transformers


def evaluates_and_saves(folder: Path) -> Trainer:
    """Its own checkpoints, the best model, a callback with state."""
    return trainer_of(
        folder, Sentences(40), [EarlyStoppingCallback(50)], eval_strategy="steps", eval_steps=4,
        save_strategy="steps", save_steps=4, save_total_limit=2, load_best_model_at_end=True,
        eval_on_start=True,
    )  # fmt: skip


def stops_early(folder: Path) -> Trainer:
    return trainer_of(
        folder, Sentences(28), [EarlyStoppingCallback(2)], num_train_epochs=4, eval_strategy="steps",
        eval_steps=2, save_strategy="best", load_best_model_at_end=True, metric_for_best_model="loss",
        save_only_model=True, save_total_limit=1, learning_rate=0.2,
    )  # fmt: skip


def accumulates_in_workers(folder: Path) -> Trainer:
    return trainer_of(
        folder, Sentences(46), gradient_accumulation_steps=3, dataloader_num_workers=2, eval_strategy="epoch",
        logging_steps=2,
    )  # fmt: skip


def stream(folder: Path) -> Trainer:
    return trainer_of(folder, Stream(38), max_steps=11, gradient_accumulation_steps=2)


class OwnLoader(Trainer):
    """Its loader does not say which batch is the last one, and the code at an epoch's end uses that batch."""

    newest: torch.Tensor

    def get_train_dataloader(self) -> DataLoader[dict[str, torch.Tensor]]:
        loader: DataLoader[dict[str, torch.Tensor]] = DataLoader(
            self.train_dataset, batch_size=4, collate_fn=self.data_collator
        )
        return loader

    def training_step(self, model: Any, inputs: Any, *others: Any) -> torch.Tensor:
        self.newest = inputs["input_ids"]
        return super().training_step(model, inputs, *others)


class LogsLastBatch(TrainerCallback):
    trainer: OwnLoader

    def on_epoch_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self.trainer.log({"sum of the last batch": float(self.trainer.newest.sum())})
        del self.trainer.newest


def own_loader(folder: Path) -> Trainer:
    callback = LogsLastBatch()
    args = arguments(folder, max_steps=11)
    callback.trainer = OwnLoader(model(), args, train_dataset=Stream(20), callbacks=[callback])
    return callback.trainer


def steps_in_bf16(folder: Path) -> Trainer:
    """Ends in the middle of an epoch."""
    return trainer_of(folder, Sentences(40), max_steps=15, bf16=True, include_num_input_tokens_seen=True)


def compiled(folder: Path) -> Trainer:
    return trainer_of(folder, Sentences(36), torch_compile=True, torch_compile_backend="aot_eager")


def plateau(folder: Path) -> Trainer:
    return trainer_of(
        folder, Sentences(36), neftune_noise_alpha=5.0, optim="sgd", lr_scheduler_type="reduce_lr_on_plateau",
        eval_strategy="steps", eval_steps=3, metric_for_best_model="loss",
    )  # fmt: skip


# ---- trainers of trl


def of_trl(folder: Path, **changed: Any) -> dict[str, Any]:
    return options(folder, bf16=False, gradient_checkpointing=False, **changed)


def sft(folder: Path) -> Trainer:
    given = trl.SFTConfig(**of_trl(folder, gradient_accumulation_steps=2, max_length=8))
    data = datasets.Dataset.from_list([{"text": text} for text in texts(56)])
    return trl.SFTTrainer(
        model(), given, train_dataset=data, processing_class=tokenizer(), peft_config=lora()
    )


def dpo(folder: Path) -> Trainer:
    given = of_trl(folder, max_length=16, sync_ref_model=True, ref_model_sync_steps=4, num_train_epochs=1)
    rows = zip(texts(40, 1), texts(40, 2), texts(40, 3), strict=True)
    data = datasets.Dataset.from_list([{"prompt": p, "chosen": c, "rejected": r} for p, c, r in rows])
    args = trl.DPOConfig(**given)
    return trl.DPOTrainer(
        model(), ref_model=model(), args=args, train_dataset=data, processing_class=tokenizer()
    )


def even_words(completions: list[str], **_: Any) -> list[float]:
    return [
        float(sum(word[-1:] in "02468" for word in text.split())) + random.random() for text in completions
    ]


def grpo(folder: Path) -> Trainer:
    """Generates once for several steps."""
    given = of_trl(
        folder, num_generations=2, max_completion_length=4, num_iterations=2, steps_per_generation=2,
        num_train_epochs=1,
    )  # fmt: skip
    data = datasets.Dataset.from_list([{"prompt": text} for text in texts(12, 4)])
    args = trl.GRPOConfig(**given)
    return trl.GRPOTrainer(
        model(), reward_funcs=even_words, args=args, train_dataset=data, processing_class=tokenizer()
    )


# ---- what is reported and compared


class Moments(TrainerCallback):
    """Reports to the job of the process."""

    def __init__(self, job: Job) -> None:
        self.job = job

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.job.step(state.global_step + 1)

    def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        moment(ACCUMULATION)

    def on_prediction_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        moment(VALIDATION)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        moment(BETWEEN)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        self.job.log(state.global_step, without_times(logs))


def without_times(logs: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in logs.items() if not any(part in name for part in TIMES)}


def train(job: Job, trainer: Trainer, **more: Any) -> dict[str, Any]:
    """One attempt. Options of the job: `every`."""
    trainer.add_callback(Moments(job))
    job.moments_in(trainer, "_save_optimizer_and_scheduler", SAVE)
    job.moments_in(trainer, "_run_epoch", EPOCH_END, after=True)
    if job.flashckpt:
        every = job.options.get("every", 1)
        output = flashckpt.transformers.train(trainer, job.run, every=every, persist_every=5, **more)
    else:
        output = trainer.train(resume_from_checkpoint=more.get("initial"))
    return result(trainer, output)


def result(trainer: Trainer, output: Any) -> dict[str, Any]:
    """All that training has made, and the names of the trainer's own checkpoints."""
    state, folder = trainer.state, Path(trainer.args.output_dir)
    kept = (
        "epoch", "global_step", "max_steps", "num_input_tokens_seen", "total_flos", "best_metric",
        "best_global_step",
    )  # fmt: skip
    reference = getattr(trainer, "ref_model", None)
    return {
        "model": trainer.model.state_dict(),
        "reference": reference.state_dict() if reference is not None else {},
        "gradients": gradients(trainer.model),
        "optimizer": trainer.optimizer.state_dict(),
        "scheduler": trainer.lr_scheduler.state_dict(),
        "random": random_numbers(),
        "state": {name: getattr(state, name) for name in kept},
        "control": vars(trainer.control),
        "callbacks": [[type(c).__name__, c.state()] for c in exportable(trainer)],
        "history": [without_times(entry) for entry in state.log_history],
        "best": os.path.basename(state.best_model_checkpoint or ""),
        "checkpoints": sorted(each.name for each in folder.glob("checkpoint*")),
        "returned": [output.global_step, output.training_loss],
    }


def exportable(trainer: Trainer) -> list[ExportableState]:
    return [c for c in trainer.callback_handler.callbacks if isinstance(c, ExportableState)]


def case_of(make: Make) -> Callable[[Job], dict[str, Any]]:
    return lambda job: train(job, make(job.folder))


def two_ranks(folder: Path) -> Trainer:
    return trainer_of(
        folder, Sentences(60), gradient_accumulation_steps=2, eval_strategy="epoch", ddp_backend="gloo",
        dataloader_num_workers=1,
    )  # fmt: skip


def dispatched(folder: Path) -> Trainer:
    """Rank 0 draws for both; the last batch of an epoch of 3 steps has one row for two ranks."""
    return trainer_of(folder, Stream(41), max_steps=9, ddp_backend="gloo", gradient_accumulation_steps=2)


def saves(folder: Path) -> Trainer:
    return trainer_of(folder, Sentences(40), save_strategy="steps", save_steps=6)


def saves_with_workers(folder: Path) -> Trainer:
    return trainer_of(folder, Sentences(40), save_strategy="steps", save_steps=3, dataloader_num_workers=2)


class Counts(TrainerCallback):
    count = 0

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.count += 1


class Seeing(Trainer):
    seen = 0

    def training_step(self, *arguments: Any, **named: Any) -> torch.Tensor:
        self.seen += 1
        return super().training_step(*arguments, **named)


class Commits(TrainerCallback):
    """Commits the second step before the third one begins."""

    def __init__(self, job: Job) -> None:
        self.job = job

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 1:
            self.job._checkpointer.save()
        elif state.global_step == 2:
            self.job._checkpointer.wait()


class Numbered(Dataset[dict[str, torch.Tensor]]):
    """Items that have their own number in them."""

    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.tensor([index // WORDS, index % WORDS, 1, 2])
        return {"input_ids": ids, "labels": ids.clone()}


def case_on_other_ranks(job: Job) -> dict[str, Any]:
    """As many items in a step on one rank as on two; each logs those that it trains on, by the epoch."""
    world = int(os.environ.get("WORLD_SIZE", 1))

    class Logs(Trainer):
        batches = 0

        def training_step(self, model: Any, inputs: Any, *others: Any) -> torch.Tensor:
            self.batches += 1
            numbers = inputs["input_ids"][:, 0] * WORDS + inputs["input_ids"][:, 1]
            place = f"{int(self.state.epoch or 0)} {job.task.attempt} {self.batches}"
            job.log(place, {"items": numbers.tolist()})
            return super().training_step(model, inputs, *others)

    backend = "gloo" if world > 1 else None
    args = arguments(job.folder, gradient_accumulation_steps=2 // world, ddp_backend=backend)
    trainer = Logs(model(), args, train_dataset=Numbered(), callbacks=[Commits(job)])
    return train(job, trainer)


def case_of_steps(job: Job) -> dict[str, Any]:
    how = {"max_steps": int(job.options["steps"]), "lr_scheduler_type": "constant", "warmup_steps": 0}
    record = train(job, trainer_of(job.folder, Sentences(40), **how))
    # Its last log is of each start.
    return {name: value for name, value in record.items() if name not in ("history", "returned")}


def case_from_initial(job: Job) -> dict[str, Any]:
    make = globals()[job.options["origin"]]
    return train(job, make(job.folder), initial=job.options["initial"])


def case_noticed(job: Job) -> dict[str, Any]:
    notice = job.folder / "notice"
    notice.unlink(missing_ok=True)
    job.remember_checkpointer()

    class Notices(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            if state.global_step == job.options.get("notice"):
                notice.touch()
                until(lambda: job._checkpointer.stopping, "the notice")

    trainer = accumulates_in_workers(job.folder)
    trainer.add_callback(Notices())
    return train(job, trainer, options=flashckpt.Options(notice_file=str(notice)))


def case_with_counters(job: Job) -> dict[str, Any]:
    counts = Counts()
    counts.count = 0
    trainer = Seeing(model(), arguments(job.folder), train_dataset=Sentences(40), callbacks=[counts])
    trainer.seen = 0
    record = train(job, trainer, own=job.options.get("own", ()))
    return {**record, "counted": [trainer.seen, counts.count]}


def case_used_afterwards(job: Job) -> dict[str, Any]:
    trainer = evaluates_and_saves(job.folder)
    before = set(vars(trainer))
    with pytest.raises(flashckpt.OptionError, match=r"trainer_state\.json"):
        flashckpt.transformers.train(trainer, job.run, initial=job.folder / "nothing")
    flashckpt.transformers.train(trainer, job.run, every=1)
    left = set(vars(trainer)) - before
    assert not left & set(OVERRIDDEN), left
    assert not any("flashckpt" in type(c).__module__ for c in trainer.callback_handler.callbacks)
    assert trainer.evaluate()["eval_loss"] > 0
    trainer.save_model(str(job.folder / "saved"))
    assert (job.folder / "saved" / "model.safetensors").is_file()
    exported = job.folder / "exported"
    flashckpt.transformers.export(job.run, exported)
    assert GPT2LMHeadModel.from_pretrained(exported).config.n_embd == 16
    trainer.train()  # by the trainer's own loop, from its start
    return {}


def case_without_its_best(job: Job) -> dict[str, Any]:
    """A finished run whose best checkpoint is deleted is started again: its end does not look for it."""

    def run() -> Trainer:
        trainer = stops_early(job.folder)
        flashckpt.transformers.train(trainer, job.run, every=1)
        return trainer

    best = run().state.best_model_checkpoint
    os.rename(best, job.folder / "moved")
    (job.folder / "out" / "checkpoint-99").mkdir()
    assert run().state.best_model_checkpoint is None
    return {}


class Mean(TrainerCallback):
    """Holds a module that follows the model's first weight."""

    def __init__(self, rate: float) -> None:
        self.rate, self.mean, self.steps = rate, torch.nn.Linear(1, 1), 0

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self.steps += int(1 / self.rate)
        with torch.no_grad():
            self.mean.weight.lerp_(next(model.parameters())[:1, :1], self.rate)


def case_with_means_of_weights(job: Job) -> dict[str, Any]:
    """Two callbacks of one class: each has its own module, and its own attributes."""

    def run() -> list[tuple[float, int]]:
        trainer = steps_in_bf16(job.folder)
        means = [Mean(0.5), Mean(0.1)]
        for each in means:
            trainer.add_callback(each)
        flashckpt.transformers.train(trainer, job.run, every=1, own=["steps"])
        return [(each.mean.weight.item(), each.steps) for each in means]

    first = run()
    assert run() == first
    assert first[0] != first[1]
    return {}


def case_with_an_invalid_config(job: Job) -> dict[str, Any]:
    """What their code refuses to write is missing in an export; the run trains."""
    trainer = steps_in_bf16(job.folder)
    trainer.model.generation_config.num_return_sequences = 3
    assert flashckpt.transformers.train(trainer, job.run, every=1).global_step == 15
    trainer.model.generation_config.num_return_sequences = 1
    assert flashckpt.transformers.keep_config(job.run, trainer.model)
    return {}


def case_ended_by_a_callback(job: Job) -> dict[str, Any]:
    """A run that a callback has ended stays ended, and continues where more steps are asked for."""

    class Ends(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_training_stop = state.global_step == 4

    def run(steps: int) -> int:
        trainer = steps_in_bf16(job.folder)
        trainer.args.max_steps = steps
        trainer.add_callback(Ends())
        step: int = flashckpt.transformers.train(trainer, job.run, every=1).global_step
        return step

    assert [run(8), run(8), run(10)] == [4, 4, 10]
    return {}


MAKES: tuple[Make, ...] = (
    evaluates_and_saves, accumulates_in_workers, stream, own_loader, steps_in_bf16,
    compiled, plateau, sft, dpo, grpo, two_ranks, dispatched, saves, saves_with_workers,
)  # fmt: skip
# The harness finds a case by its name in this module.
globals().update({f"case_{make.__name__}": case_of(make) for make in MAKES})
