"""transformers: ``Trainer`` with ``fsdp_config={"version": 1, ...}``, and ``Seq2SeqTrainer`` that generates."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common import (
    BATCH,
    LENGTH,
    VOCABULARY,
    accelerate_on_cpu,
    batches,
    check,
    equal_to_dense,
    gpt2,
    llama,
    shared_folder,
    train_dense,
    wrappers_in,
)
from torch import nn

_ALL = torch.cat(batches(6))


class _Rows(torch.utils.data.Dataset):
    """Token ids as causal language modelling wants them, in a fixed order."""

    def __init__(self, rows: torch.Tensor) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self._rows[index], "labels": self._rows[index]}


def _arguments(folder: Path, fsdp: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    return {
        "output_dir": str(folder),
        "use_cpu": True,
        "ddp_backend": "gloo",
        "fsdp": "full_shard auto_wrap",
        "fsdp_config": {
            "version": 1,
            "sync_module_states": False,
            "use_orig_params": True,
            **(fsdp or {}),
        },
        "per_device_train_batch_size": BATCH // dist.get_world_size(),
        "per_device_eval_batch_size": BATCH // dist.get_world_size(),
        "max_steps": 6,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.5,
        "optim": "adamw_torch",
        "report_to": [],
        "save_strategy": "no",
        "logging_steps": 1,
        "disable_tqdm": True,
        "seed": 3,
        "train_sampling_strategy": "sequential",
        **changes,
    }


def _trainer(model: nn.Module, folder: Path, **changes: Any) -> Any:
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(**_arguments(folder, **changes))
    return Trainer(
        model=model, args=arguments, train_dataset=_Rows(_ALL), eval_dataset=_Rows(_ALL[:8])
    )


def _dense(make: Any, count: int = 6, accumulate: int = 1) -> nn.Module:
    """Trained as the Trainer would in one process."""
    model = make()
    train_dense(
        model,
        batches(6)[: count * accumulate],
        accumulate=accumulate,
        max_norm=0.5,
        make=lambda params: torch.optim.AdamW(params, lr=1e-2, weight_decay=0.0),
    )
    return model


@check
def trains_and_evaluates_like_one_process() -> None:
    """Trainer.train and evaluate: parameters and loss equal the dense run, both exposures, tied weights."""
    for make in (llama, gpt2):
        for orig in (True, False):
            dense = _dense(make)
            with accelerate_on_cpu(), shared_folder() as folder:
                trainer = _trainer(make(), folder, fsdp={"use_orig_params": orig})
                trainer.train()
                assert wrappers_in(trainer.model) == 3
                equal_to_dense(trainer.model, dense)
                loss = trainer.evaluate()["eval_loss"]
                if make is gpt2:
                    continue  # whose loss the Trainer divides by one token more than there are targets
                wanted = dense(input_ids=_ALL[:8], labels=_ALL[:8]).loss.item()
                assert abs(loss - wanted) < 1e-4, (loss, wanted)


@check
def accumulates_and_checkpoints_activations() -> None:
    """gradient_accumulation_steps=2 with FSDP's activation checkpointing equals the dense run."""
    dense = _dense(llama, 3, accumulate=2)
    with accelerate_on_cpu(), shared_folder() as folder:
        trainer = _trainer(
            llama(),
            folder,
            fsdp={"activation_checkpointing": True},
            gradient_accumulation_steps=2,
            max_steps=3,
        )
        trainer.train()
        equal_to_dense(trainer.model, dense)


@check
def resumes_from_a_checkpoint() -> None:
    """Checkpoint after three steps, resume in a new Trainer: equal to the run that never stopped."""
    for orig, kind in itertools.product((True, False), ("FULL_STATE_DICT", "SHARDED_STATE_DICT")):
        dense = _dense(llama)
        with accelerate_on_cpu(), shared_folder() as folder:
            plugin = {"use_orig_params": orig, "state_dict_type": kind}
            saving = {"save_strategy": "steps", "save_steps": 3}
            _trainer(llama(), folder, fsdp=plugin, max_steps=3, **saving).train()
            trainer = _trainer(llama(seed=1), folder, fsdp=plugin, **saving)
            trainer.train(resume_from_checkpoint=True)
            assert trainer.state.global_step == 6
            equal_to_dense(trainer.model, dense)


@check
def saves_a_model_that_loads_without_wrapping() -> None:
    """save_model writes what from_pretrained reads: equal to the dense model."""
    dense = _dense(gpt2)
    with accelerate_on_cpu(), shared_folder() as folder:
        trainer = _trainer(gpt2(), folder)
        trainer.train()
        trainer.save_model(str(folder / "final"))
        dist.barrier()
        again = type(dense).from_pretrained(folder / "final")
        for name, value in dense.state_dict().items():
            torch.testing.assert_close(again.state_dict()[name], value, atol=2e-5, rtol=2e-5)


@check
def trains_in_bfloat16() -> None:
    """bf16=True: float32 shards, near the dense run."""
    dense = _dense(llama)
    with accelerate_on_cpu(), shared_folder() as folder:
        trainer = _trainer(llama(), folder, bf16=True)
        trainer.train()
        assert trainer.model.mixed_precision.param_dtype is torch.bfloat16
        equal_to_dense(trainer.model, dense, tolerance=5e-2)


@check
def decays_by_name() -> None:
    """weight_decay leaves norms and biases out, as names and shapes of the unwrapped model say."""
    dense = gpt2()
    decayed = [p for name, p in dense.named_parameters() if p.ndim > 1]
    plain = [p for name, p in dense.named_parameters() if p.ndim == 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.3}, {"params": plain, "weight_decay": 0.0}], lr=1e-2
    )
    for batch in batches(6):
        dense(input_ids=batch, labels=batch).loss.backward()
        nn.utils.clip_grad_norm_(dense.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    with accelerate_on_cpu(), shared_folder() as folder:
        trainer = _trainer(gpt2(), folder, weight_decay=0.3)
        trainer.train()
        sizes = [len(group["params"]) for group in trainer.optimizer.param_groups]
        assert sizes == [len(decayed), len(plain)], sizes
        equal_to_dense(trainer.model, dense)


@check
def generates() -> None:
    """model.generate of the wrapped model, sampled and greedy, equals the dense model's tokens."""
    dense = _dense(llama)
    prompt = _ALL[:2, :4]
    with accelerate_on_cpu(), shared_folder() as folder:
        trainer = _trainer(llama(), folder)
        trainer.train()
        options = {"max_new_tokens": 8, "attention_mask": torch.ones_like(prompt)}
        wanted = dense.generate(prompt, do_sample=False, **options)
        assert torch.equal(
            trainer.model.generate(prompt, do_sample=False, synced_gpus=True, **options), wanted
        )
        with type(trainer.model).summon_full_params(trainer.model):
            assert torch.equal(trainer.model.generate(prompt, do_sample=False, **options), wanted)


@check
def trains_and_generates_with_an_encoder_and_decoder() -> None:
    """Seq2SeqTrainer with T5: train, evaluate with predict_with_generate; equal to the dense run."""
    from transformers import (
        Seq2SeqTrainer,
        Seq2SeqTrainingArguments,
        T5Config,
        T5ForConditionalGeneration,
    )

    def make(seed: int = 0) -> nn.Module:
        torch.manual_seed(seed)
        return T5ForConditionalGeneration(
            T5Config(
                vocab_size=VOCABULARY,
                d_model=16,
                d_kv=4,
                d_ff=24,
                num_layers=2,
                num_decoder_layers=2,
                num_heads=4,
                dropout_rate=0.0,
                pad_token_id=0,
                eos_token_id=1,
                decoder_start_token_id=0,
            )
        )

    dense = _dense(make)
    with accelerate_on_cpu(), shared_folder() as folder:
        arguments = Seq2SeqTrainingArguments(
            **_arguments(folder), predict_with_generate=True, generation_max_length=LENGTH
        )
        trainer = Seq2SeqTrainer(
            model=make(), args=arguments, train_dataset=_Rows(_ALL), eval_dataset=_Rows(_ALL[:8])
        )
        trainer.train()
        equal_to_dense(trainer.model, dense)
        told = trainer.predict(_Rows(_ALL[:8])).predictions
        wanted = dense.generate(_ALL[:8], max_length=LENGTH)
        width = min(wanted.shape[1], told.shape[1])
        assert torch.equal(torch.as_tensor(told)[:, :width], wanted[:, :width])


@check
def classifies_with_an_encoder() -> None:
    """BertForSequenceClassification: pooled outputs, a head of its own, dropout off; equal to the dense run."""
    from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

    def make(seed: int = 0) -> nn.Module:
        torch.manual_seed(seed)
        return BertForSequenceClassification(
            BertConfig(
                vocab_size=VOCABULARY,
                hidden_size=16,
                num_hidden_layers=2,
                num_attention_heads=4,
                intermediate_size=24,
                max_position_embeddings=32,
                hidden_dropout_prob=0.0,
                attention_probs_dropout_prob=0.0,
                num_labels=3,
            )
        )

    class Labelled(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return len(_ALL)

        def __getitem__(self, index: int) -> dict[str, Any]:
            return {"input_ids": _ALL[index], "labels": index % 3}

    dense = make()
    optimizer = torch.optim.AdamW(dense.parameters(), lr=1e-2, weight_decay=0.0)
    for start in range(0, len(_ALL), BATCH):
        labels = torch.arange(start, start + BATCH) % 3
        dense(input_ids=_ALL[start : start + BATCH], labels=labels).loss.backward()
        nn.utils.clip_grad_norm_(dense.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    with accelerate_on_cpu(), shared_folder() as folder:
        arguments = TrainingArguments(**_arguments(folder), average_tokens_across_devices=False)
        trainer = Trainer(model=make(), args=arguments, train_dataset=Labelled())
        trainer.train()
        equal_to_dense(trainer.model, dense, tolerance=1e-4)
