"""`transformers.Trainer` whose model is trained by a plan.

    trainer = PlannerTrainer(model, args, train_dataset=data, plan="plan.json")
    trainer.train()

All but the loop is the Trainer's: arguments, collators, optimizer, scheduler, callbacks, logs. The
loop is a few lines, since a step of the engine is forward, backward, clipping and update at once.
What the plan decides (precision, sharding, recomputation, accumulation of microbatches) is refused
as an argument.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader, Subset
from torch.utils.data import IterableDataset as TorchStream
from transformers import Trainer, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import (
    EvalPrediction,
    PredictionOutput,
    SaveStrategy,
    TrainOutput,
    get_last_checkpoint,
    rotate_checkpoints,
    speed_metrics,
)

from planner.errors import PlanError
from planner.language.plan import Plan, load_plan
from planner.runtime.apply import apply_plan
from planner.runtime.batches.count_tokens import count_tokens
from planner.runtime.batches.loader import Loader
from planner.runtime.step.engine import Engine

_STATE = "trainer_state.json"
_TRAINING = "training"
"""The folder of a checkpoint in which the engine's state is."""

_DECIDED: Mapping[str, str] = {
    "fsdp": "search with `zero`",
    "deepspeed": "search with `zero`",
    "torch_compile": "the plan says what is compiled",
    "auto_find_batch_size": "the plan fits its memory",
    "label_smoothing_factor": "give `loss` here and in the model file",
    "neftune_noise_alpha": "hooks on the model's outputs are part of no plan",
    "activation_checkpointing": "the plan says what is recomputed",
    "gradient_checkpointing": "the plan says what is recomputed",
}
"""Arguments of a Trainer that a plan decides, with what to do instead."""


_NOT_CALLED: Mapping[str, str] = {
    "training_step": "forward, backward and update are one step of the engine; what happens around "
    "it goes into callbacks",
    "_prepare_inputs": "change batches in `data_collator`",
    "get_batch_samples": "change batches in `data_collator`",
    "_get_train_sampler": "give a DataLoader with that sampler: override get_train_dataloader to "
    "return self.engine.loader(DataLoader(..., sampler=...))",
    "prediction_step": "give `predictions`, and `compute_metrics`",
    "evaluation_loop": "give `predictions`, and `compute_metrics`",
}
"""Methods of a Trainer that have no place here, with what to do instead of an own one."""


_ORDERS = {"random": True, "sequential": False}
"""Whether samples are shuffled, by `train_sampling_strategy`."""


class PlannerTrainer(Trainer):
    """A Trainer over the ranks of a plan. Every rank makes it, with the same arguments."""

    def __init__(
        self,
        *args: Any,
        plan: Plan | str | os.PathLike[str],
        apply: Mapping[str, Any] | None = None,
        predictions: str | None = None,
        **kwargs: Any,
    ) -> None:
        """`plan` is that of ``planner.search`` for this model; `apply` has further options of
        `planner.apply` (`loss`, `loss_weight`, `pad`, `weights`). `predictions` names the module
        whose output `compute_metrics` is given (None: the one that gives the model's logits).
        Other arguments are the Trainer's. Raises PlanError for those that the plan decides.
        """
        self._plan = plan if isinstance(plan, Plan) else load_plan(plan)
        self._options = dict(apply or {})
        self._predictions = predictions
        self._engine: Engine | None = None
        given = args[0] if args else kwargs.get("model")
        # The Trainer sets this, and the plan is for the model as its file makes it.
        self._use_cache = getattr(getattr(given, "config", None), "use_cache", None)
        self.state: Any
        self.control: Any
        self.lr_scheduler: Any
        self._created_lr_scheduler: bool
        super().__init__(*args, **kwargs)
        if self.model_init is not None:
            raise PlanError("model_init makes models anew; give the model, and a run for each")
        self._refuse_what_the_plan_decides()

    # -- what is trained ----------------------------------------------------------------

    @property
    def engine(self) -> Engine:
        """The engine, made when first needed: it takes model and optimizer over."""
        if self._engine is None:
            self.model.train()  # as a model from files is not; captured is what training does
            if self._use_cache is not None:
                self.model.config.use_cache = self._use_cache
            self.create_optimizer()
            clipped = self.args.max_grad_norm
            options = {
                "max_grad_norm": clipped if clipped and clipped > 0 else None,
                "loss_weight": self._tokens(),
                **self._options,
            }
            self._engine = apply_plan(self._plan, self.model, optimizer=self.optimizer, **options)
            self._check_batch(self._engine)
        return self._engine

    def _tokens(self) -> Callable[[Any], int] | None:
        """Return what counts labels, where the Trainer would take the mean over all of them."""
        paths = {path for path, *_ in self._plan.model.inputs}
        if not self.model_accepts_loss_kwargs or "labels" not in paths:
            return None
        return count_tokens("labels", skip_first=self._loss_shifts_labels)

    def _check_batch(self, engine: Engine) -> None:
        given = self.args.per_device_train_batch_size * engine.num_replicas
        if given != engine.plan.global_batch:
            raise PlanError(
                f"per_device_train_batch_size={self.args.per_device_train_batch_size} on "
                f"{engine.num_replicas} replicas makes batches of {given} and the plan's global "
                f"batch is {engine.plan.global_batch}; give "
                f"{engine.plan.global_batch / engine.num_replicas:g}, or search with "
                f"`global_batch` {given}"
            )

    def _refuse_what_the_plan_decides(self) -> None:
        for name, instead in _DECIDED.items():
            if value := getattr(self.args, name, None):
                raise PlanError(
                    f"TrainingArguments has {name}={value!r}, which the plan decides; leave it "
                    f"out: {instead}"
                )
        if (
            self.compute_loss_func is not None
            or type(self).compute_loss is not Trainer.compute_loss
        ):
            raise PlanError(
                "a Trainer's own loss is no part of the plan; give `loss`, a function of (output, "
                'batch), as apply={"loss": ...} and in the model file'
            )
        for name, instead in _NOT_CALLED.items():
            if getattr(type(self), name, None) is not getattr(Trainer, name, None):
                raise PlanError(
                    f"{type(self).__name__}.{name} would never be called under a plan; leave it "
                    f"out: {instead}"
                )
        if getattr(self.args, "include_num_input_tokens_seen", "no") not in ("no", False):
            raise PlanError(
                f"TrainingArguments has include_num_input_tokens_seen="
                f"{self.args.include_num_input_tokens_seen!r} and no rank reads all of a batch; "
                "leave it out: a callback counts state.global_step times the tokens of a batch"
            )
        if (order := self.args.train_sampling_strategy) not in _ORDERS:
            raise PlanError(
                f"train_sampling_strategy={order!r} sorts samples by length; use one of "
                f"{', '.join(_ORDERS)}, and `lengths` of the search for shapes that vary"
            )
        for name in ("bf16", "fp16"):
            if getattr(self.args, name, False) and self._plan.precision != name:
                raise PlanError(
                    f"TrainingArguments has {name}=True and the plan's precision is "
                    f"{self._plan.precision}; leave it out, or search with `precision` {name}"
                )

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Leave the model where it is: the engine takes each rank's pieces of it."""

    # -- data ---------------------------------------------------------------------------

    def get_train_dataloader(self) -> Any:
        """Return the engine's loader of the training data: for each step this replica's part."""
        data, collate = self._columns(self.train_dataset, "Training")
        args = self.args
        is_stream = isinstance(data, TorchStream) or not hasattr(data, "__getitem__")
        loader = self.engine.loader(
            data,
            shuffle=None if is_stream else _ORDERS[args.train_sampling_strategy],
            seed=args.seed if args.data_seed is None else args.data_seed,
            at_end="drop" if args.dataloader_drop_last else "wrap",
            collate_fn=collate,
            num_workers=args.dataloader_num_workers,
            prefetch_factor=args.dataloader_prefetch_factor,
        )
        loader.warn_of_rest("dataloader_drop_last=True leaves them out")
        return loader

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader[Any]:
        """Return whole batches of an evaluation's data in order, the same on every rank.

        With `dataloader_drop_last` samples are left out as the Trainer does: those that fill no
        more batch of `per_device_eval_batch_size` on each replica.
        """
        data = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(data, str):
            data = self.eval_dataset[data]
        if data is None:
            raise PlanError("evaluation needs eval_dataset; give one to the trainer or the call")
        data, collate = self._columns(data, "Evaluation")
        if self.args.dataloader_drop_last and not isinstance(data, TorchStream):
            whole = self.args.per_device_eval_batch_size * self.engine.num_replicas
            data = Subset(data, range(len(data) // whole * whole))
        return DataLoader(
            data,
            batch_size=self._plan.global_batch,
            collate_fn=collate,
            num_workers=self.args.dataloader_num_workers,
        )

    def _columns(self, data: Any, what: str) -> tuple[Any, Any]:
        """Return a dataset and its collator, without columns that the model has no use for."""
        if data is None:
            raise PlanError("training needs train_dataset; give one to the trainer")
        if hasattr(data, "column_names"):
            return self._remove_unused_columns(data, description=what), self.data_collator
        return data, self._get_collator_with_removed_columns(self.data_collator, description=what)

    # -- training -----------------------------------------------------------------------

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> TrainOutput:
        """Train as the arguments say, from a checkpoint of this trainer (under any plan) or anew.

        Callbacks are called as by the Trainer, but that `on_pre_optimizer_step` has no place: the
        update is part of the engine's step.
        """
        if trial is not None:
            raise PlanError("a search for hyperparameters makes models anew; start a run for each")
        engine, args = self.engine, self.args
        loader = self.get_train_dataloader()
        per_pass = self._updates_of_a_pass(loader)
        max_steps = args.max_steps
        if max_steps <= 0:
            if per_pass is None:
                raise PlanError("a stream has no length; give TrainingArguments max_steps")
            max_steps = math.ceil(args.num_train_epochs * per_pass)
        self._begin(max_steps, per_pass)
        if folder := _resumed(resume_from_checkpoint, args):
            self._load(folder, loader)
        began, first = time.time(), self.state.global_step
        logged = _Logged(self.state.global_step)
        self.is_in_train = True
        self.control = self.callback_handler.on_train_begin(args, self.state, self.control)
        if args.eval_on_start:
            self.evaluate(ignore_keys=ignore_keys_for_eval)
        while self.state.global_step < max_steps and not self.control.should_training_stop:
            self.control = self.callback_handler.on_epoch_begin(args, self.state, self.control)
            # (A checkpoint may stand at the end of a pass, of which nothing is left.)
            before, is_whole = self.state.global_step, loader.samples == 0
            for parts in _grouped(loader, args.gradient_accumulation_steps):
                self._update(parts, logged, per_pass)
                self._after_step(logged, loader, ignore_keys_for_eval)
                is_over = self.state.global_step >= max_steps or self.control.should_training_stop
                if is_over or self.control.should_epoch_stop:
                    break
            if is_whole and self.state.global_step == before:
                raise PlanError("the training data gave no batch; see train_dataset")
            self.control = self.callback_handler.on_epoch_end(args, self.state, self.control)
            self._after_step(logged, loader, ignore_keys_for_eval)
        self.is_in_train = False
        engine.wait_for_save()
        steps = self.state.global_step - first
        loss = logged.mean(self.state.global_step)
        metrics = speed_metrics(
            "train", began, num_samples=steps * engine.plan.global_batch, num_steps=steps
        )
        self.log(metrics | {"train_loss": loss})
        if args.load_best_model_at_end and self.state.best_model_checkpoint is not None:
            engine.load(Path(self.state.best_model_checkpoint) / _TRAINING)
        self.control = self.callback_handler.on_train_end(args, self.state, self.control)
        return TrainOutput(self.state.global_step, loss, metrics | {"train_loss": loss})

    def _updates_of_a_pass(self, loader: Loader) -> int | None:
        try:
            return max(1, math.ceil(len(loader) / self.args.gradient_accumulation_steps))
        except TypeError:  # a stream
            return None

    def _begin(self, max_steps: int, per_pass: int | None) -> None:
        """Set the state of a training from its beginning on, and make its schedule."""
        exportable = (*self.callback_handler.callbacks, self.control)
        self.state = state = TrainerState(
            is_local_process_zero=self.is_local_process_zero(),
            is_world_process_zero=self.is_world_process_zero(),
            stateful_callbacks=[each for each in exportable if isinstance(each, ExportableState)],
        )
        state.epoch, state.max_steps = 0.0, max_steps
        state.num_train_epochs = math.ceil(max_steps / per_pass) if per_pass else 1
        for kind in ("logging", "eval", "save"):
            every = getattr(self.args, f"{kind}_steps")
            if every is not None and every < 1:
                every = math.ceil(max_steps * every)
            setattr(state, f"{kind}_steps", every)
        if self._created_lr_scheduler:
            self.lr_scheduler, self._created_lr_scheduler = None, False
        self.create_scheduler(num_training_steps=max_steps)
        handler = self.callback_handler
        handler.model, handler.optimizer = self.model, self.optimizer
        handler.lr_scheduler = self.lr_scheduler

    def _update(self, parts: list[Any], logged: _Logged, per_pass: int | None) -> None:
        """Train on the parts of one update."""
        args, handler = self.args, self.callback_handler
        self.control = handler.on_step_begin(args, self.state, self.control)
        self.model.train()
        losses = []
        for at, part in enumerate(parts, 1):
            losses.append(self.engine.step(part, update=at == len(parts)))
            if at < len(parts):
                self.control = handler.on_substep_end(args, self.state, self.control)
        counted = self.engine.counted
        for loss, count in zip(losses, counted, strict=True):
            logged.add(loss * (count / sum(counted)))
        self.control = handler.on_optimizer_step(args, self.state, self.control)
        logged.rate = self._get_learning_rate()
        if not isinstance(self.lr_scheduler, ReduceLROnPlateau) and not self.engine.is_skipped:
            self.lr_scheduler.step()
        self.state.global_step += 1
        if per_pass is not None:
            self.state.epoch = self.state.global_step / per_pass
        self.control = handler.on_step_end(args, self.state, self.control)

    def _after_step(self, logged: _Logged, loader: Loader, ignore_keys: list[str] | None) -> None:
        """Log, evaluate and save where that is due."""
        if self.control.should_log and self.state.global_step > logged.step:
            logs = logged.take(self.state.global_step)
            if self.engine.grad_norm is not None:
                logs["grad_norm"] = float(self.engine.grad_norm)
            self.log(logs)
        if self.control.should_evaluate:
            metrics = self.evaluate(ignore_keys=ignore_keys)
            if isinstance(self.lr_scheduler, ReduceLROnPlateau):
                self.lr_scheduler.step(metrics[_metric(self.args)])
            is_best = self._is_best(metrics)
            if self.args.save_strategy == SaveStrategy.BEST:
                self.control.should_save = is_best
        if self.control.should_save:
            self._save_training(loader)
            self.control = self.callback_handler.on_save(self.args, self.state, self.control)

    def _is_best(self, metrics: Mapping[str, float]) -> bool:
        """Whether an evaluation is the best so far, which is noted."""
        if self.args.metric_for_best_model is None:
            return False
        name, best = _metric(self.args), self.state.best_metric
        if name not in metrics:
            raise PlanError(
                f"metric_for_best_model is {name!r} and the evaluation gave {', '.join(metrics)}"
            )
        is_better = best is None or (
            metrics[name] > best if self.args.greater_is_better else metrics[name] < best
        )
        if is_better:
            self.state.best_metric = metrics[name]
            self.state.best_global_step = self.state.global_step
        return is_better

    # -- evaluation ---------------------------------------------------------------------

    def evaluate(
        self,
        eval_dataset: Any = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> dict[str, float]:
        """Return the mean loss over a dataset, in evaluation mode, and what `compute_metrics` makes
        of the predictions (on rank 0, which tells the others).
        """
        data = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(data, dict):
            found: dict[str, float] = {}
            for name, each in data.items():
                prefix = f"{metric_key_prefix}_{name}"
                found |= self.evaluate(each, ignore_keys, metric_key_prefix=prefix)
            return found
        metrics = self._evaluated(data, metric_key_prefix).metrics
        self.log(dict(metrics))
        self.control = self.callback_handler.on_evaluate(
            self.args, self.state, self.control, metrics
        )
        return metrics

    def predict(
        self,
        test_dataset: Any,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "test",
    ) -> PredictionOutput:
        """Return predictions and labels (None but on rank 0), and the metrics of a dataset."""
        output = self._evaluated(test_dataset, metric_key_prefix, keep=True)
        self.control = self.callback_handler.on_predict(
            self.args, self.state, self.control, output.metrics
        )
        return output

    def _evaluated(self, data: Any, prefix: str, *, keep: bool = False) -> PredictionOutput:
        began = time.time()
        engine = self.engine
        keep = keep or self.compute_metrics is not None
        fetched = [self._module_of_predictions()] if keep else []
        total, count, steps = 0.0, 0, 0
        logits: list[Tensor] = []
        labels: list[Tensor] = []
        batches = self.get_eval_dataloader(data)
        self.callback_handler.eval_dataloader = batches
        for batch in batches:
            samples = _samples(batch)
            loss = engine.evaluate(_repeated(batch, samples, engine.plan), fetch=fetched)
            total, count, steps = total + float(loss) * samples, count + samples, steps + 1
            if engine.fetched:
                made = engine.fetched[fetched[0]][:samples]
                if self.preprocess_logits_for_metrics is not None:
                    made = self.preprocess_logits_for_metrics(made, batch.get("labels"))
                logits.append(made)
                if "labels" in batch:
                    labels.append(batch["labels"])
            self.control = self.callback_handler.on_prediction_step(
                self.args, self.state, self.control
            )
        if not count:
            raise PlanError("the evaluation's data gave no batch; see eval_dataset")
        metrics = {f"{prefix}_loss": total / count}
        predicted = torch.cat(logits).numpy() if logits else None
        expected = torch.cat(labels).numpy() if labels else None
        metrics |= self._metrics(predicted, expected, prefix)
        metrics |= speed_metrics(prefix, began, num_samples=count, num_steps=steps)
        return PredictionOutput(predictions=predicted, label_ids=expected, metrics=metrics)

    def _metrics(self, predicted: Any, expected: Any, prefix: str) -> dict[str, float]:
        """Return what `compute_metrics` makes on rank 0, on every rank."""
        if self.compute_metrics is None:
            return {}
        found: list[Any] = [None]
        if predicted is not None:
            given = EvalPrediction(predictions=predicted, label_ids=expected)
            found = [{f"{prefix}_{name}": v for name, v in self.compute_metrics(given).items()}]
        if dist.get_world_size() > 1:
            dist.broadcast_object_list(found, src=0, group=self.engine.mesh.control)
        made: dict[str, float] = found[0]
        return made

    def _module_of_predictions(self) -> str:
        """Return the name of the module whose output are the predictions."""
        if self._predictions is not None:
            return self._predictions
        head = getattr(self.model, "get_output_embeddings", lambda: None)()
        for name, module in self.model.named_modules():
            if name and module is head:
                return name
        with_parameters = [n for n, m in self.model.named_children() if any(m.parameters())]
        return with_parameters[-1]

    # -- checkpoints --------------------------------------------------------------------

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the whole model, for `from_pretrained`. Every rank calls it."""
        values = self.engine.full_state_dict()
        if self.is_world_process_zero():
            self._save(output_dir or self.args.output_dir, state_dict=values)

    def _save_training(self, loader: Loader) -> None:
        """Save all of the training under ``checkpoint-STEP``: each rank its own pieces."""
        folder = Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}"
        if self.args.save_only_model:
            self.save_model(str(folder))
        else:
            self.engine.save(folder / _TRAINING, keep=1, extra=self._extra(loader))
        if self.state.best_global_step == self.state.global_step:
            self.state.best_model_checkpoint = str(folder)
        if not self.is_world_process_zero():
            return
        for each in (*self.callback_handler.callbacks, self.control):
            if isinstance(each, ExportableState):
                self.state.stateful_callbacks[type(each).__name__] = each.state()
        folder.mkdir(parents=True, exist_ok=True)
        self.state.save_to_json(str(folder / _STATE))
        rotate_checkpoints(
            output_dir=self.args.output_dir,
            save_total_limit=self.args.save_total_limit,
            best_model_checkpoint=self.state.best_model_checkpoint,
            use_mtime=True,
        )

    def _load(self, folder: Path, loader: Loader) -> None:
        """Go on from a checkpoint: weights, optimizer, schedule, position in the data, counts."""
        self.engine.load(folder / _TRAINING, extra=self._extra(loader))
        kept = self.state
        self.state = TrainerState.load_from_json(str(folder / _STATE))
        for name in ("max_steps", "num_train_epochs", "is_local_process_zero"):
            setattr(self.state, name, getattr(kept, name))
        self.state.is_world_process_zero = kept.is_world_process_zero
        for kind in ("logging", "eval", "save"):
            setattr(self.state, f"{kind}_steps", getattr(kept, f"{kind}_steps"))
        self._load_callback_state()

    def _extra(self, loader: Loader) -> dict[str, Any]:
        return {"scheduler": self.lr_scheduler, "loader": loader}


class _Logged:
    """Losses since the last line of the log, and of the whole training. Mutable."""

    def __init__(self, step: int) -> None:
        self.step = self._first = step
        self.rate: float | None = None
        self._since: Tensor | float = 0.0
        self._before = 0.0

    def add(self, loss: Tensor) -> None:
        """Add a step's loss, without waiting for its value."""
        self._since = self._since + loss.detach()

    def take(self, step: int) -> dict[str, float]:
        """Return a line of the log, of the steps since the last."""
        since = float(self._since)
        line = {"loss": since / (step - self.step)}
        if self.rate is not None:
            line["learning_rate"] = self.rate
        self._before, self._since, self.step = self._before + since, 0.0, step
        return line

    def mean(self, step: int) -> float:
        """Return the mean loss of all steps."""
        return (self._before + float(self._since)) / max(step - self._first, 1)


def _grouped(parts: Iterable[Any], size: int) -> Iterator[list[Any]]:
    """Yield so many parts at a time, the last ones fewer."""
    every = iter(parts)
    while group := list(islice(every, size)):
        yield group


def _resumed(given: str | bool | None, args: TrainingArguments) -> Path | None:
    """Return the checkpoint to go on from, if any. Raises PlanError where there is none."""
    if not given:
        return None
    folder = get_last_checkpoint(args.output_dir) if given is True else given
    if folder is None or not (Path(folder) / _TRAINING).is_dir():
        raise PlanError(
            f"resume_from_checkpoint={given!r}: {folder or args.output_dir} has no training of a "
            "PlannerTrainer; give the folder of one of its checkpoints"
        )
    return Path(folder)


def _metric(args: TrainingArguments) -> str:
    """Return the full name of the metric by which evaluations are compared."""
    name = args.metric_for_best_model or "loss"
    return name if name.startswith("eval_") else f"eval_{name}"


def _samples(batch: Mapping[str, Any]) -> int:
    """Return how many samples a batch has."""
    return next(len(v) for v in batch.values() if isinstance(v, Tensor) and v.dim())


def _repeated(batch: Any, samples: int, plan: Plan) -> Any:
    """Return a batch that the plan can cut: the last of a dataset may have too few samples. Each
    is there as often as the others, so means stay what they are: up to the whole batch where that
    can be, as some layouts divide samples, else up to the least that can be cut.
    """
    wanted = plan.least_batch if plan.global_batch % samples else plan.global_batch
    times = math.ceil(wanted / samples)
    if times == 1:
        return batch
    if plan.unit.runs > 1:
        raise PlanError(
            f"the last batch has {samples} samples, which belong together in {plan.unit.spelled} "
            f"and can't be filled up to {wanted}; evaluate on a multiple of {plan.global_batch}"
        )
    return tree_map_only(Tensor, lambda t: torch.cat([t] * times) if t.dim() else t, batch)
