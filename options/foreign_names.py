"""Keys of PyTorch, DeepSpeed, Hugging Face and torchtitan, and the keys here that mean the same."""

from __future__ import annotations

from collections.abc import Sequence

_BATCH = "(samples of a step, over all replicas)"
_WARMUP = "(a number of steps)"
_HALF = "bf16.enabled or fp16.enabled"
_LOADER = "nothing: a DataLoader of your own has it"
_LOOP = "nothing: the loop of your script sets this"

# Names; the key of a training file; the key of a configuration, or what to write in the script. A name may begin with
# the section that it stands in. What stands behind a key goes into the message too.
ROWS: tuple[tuple[str, str, str], ...] = (
    # the optimizer and the learning rate
    ("lr learning_rate peak_lr max_lr", "training.learning_rate", "optimizer.params.lr"),
    ("weight_decay", "optimizer.weight_decay", "optimizer.params.weight_decay"),
    ("betas beta1 beta2 adam_beta1 adam_beta2", "optimizer.betas", "optimizer.params.betas"),
    ("eps epsilon adam_epsilon adam_eps", "optimizer.eps", "optimizer.params.eps"),
    ("momentum", "optimizer.momentum", "optimizer.params.momentum"),
    ("optim optimizer optimizer_type optimizer_name", "optimizer", "optimizer.type"),
    (
        "scheduler lr_scheduler lr_scheduler_type lr_schedule lr_decay_style",
        "training.learning_rate.schedule",
        "scheduler.type",
    ),
    (
        "warmup warmup_steps num_warmup_steps lr_warmup_steps warmup_iters warmup_ratio warmup_num_steps",
        f"training.learning_rate.warmup_steps {_WARMUP}",
        f"scheduler.params.warmup_num_steps {_WARMUP}",
    ),
    (
        "min_lr min_lr_ratio min_lr_factor",
        "training.learning_rate.minimum (a share of the peak)",
        "scheduler.params, with the name that scheduler.type has for it",
    ),
    (
        "clip clip_grad clip_grad_norm grad_clip gradient_clip_val gradient_clipping max_grad_norm max_norm",
        "clip",
        "gradient_clipping",
    ),
    # dtypes
    (
        "dtype torch_dtype param_dtype precision mixed_precision mixed_precision_param half",
        "precision",
        _HALF,
    ),
    ("bf16 bfloat16 fp16 float16 fp32", "precision (bf16, fp16 or fp32)", _HALF),
    # batches, and the length of a run
    ("batch batch_size global_batch_size train_batch_size", f"batch.size {_BATCH}", f"train_batch_size {_BATCH}"),
    (
        (
            "microbatch micro_batch_size microbatch_size per_device_train_batch_size train_micro_batch_size_per_gpu "
            "pipeline_parallel_microbatch_size local_batch_size"
        ),
        "batch.microbatch",
        "train_micro_batch_size_per_gpu",
    ),
    (
        "gradient_accumulation gradient_accumulation_steps accumulation_steps accumulate_grad_batches grad_accum gas",
        "batch.size and batch.microbatch (batch / microbatch / replicas is the number of microbatches)",
        "gradient_accumulation_steps",
    ),
    (
        "sequence seq_len seq_length sequence_length max_seq_len max_seq_length max_length block_size context_length",
        "training.sequence",
        "nothing: the batches of your script set this",
    ),
    ("steps max_steps num_steps num_training_steps total_steps train_steps train_iters", "training.steps", _LOOP),
    ("epochs num_epochs max_epochs num_train_epochs", "training.epochs", _LOOP),
    ("max_tokens num_tokens train_tokens training.max_tokens", "training.tokens", _LOOP),
    ("seed random_seed manual_seed data_seed", "seed (of the file, outside its sections)", "seed"),
    # memory and speed
    (
        "recompute gradient_checkpointing activation_checkpoint activation_checkpointing",
        "recompute",
        "activation_checkpointing.enabled",
    ),
    ("recompute_activations", "recompute: selective", "activation_checkpointing.granularity: selective"),
    ("recompute_granularity", "recompute.granularity", "activation_checkpointing.granularity"),
    ("recompute_num_layers", "recompute.interval", "activation_checkpointing.interval"),
    ("zero zero_stage zero_optimization fsdp", "zero", "zero_optimization.stage"),
    ("compile torch_compile", "compile", "compile"),
    ("num_workers dataloader_num_workers", "data.threads", _LOADER),
    ("pin_memory dataloader_pin_memory", "nothing: a run has no such setting", _LOADER),
    ("shuffle", "data.shuffle", _LOADER),
    ("drop_last dataloader_drop_last", "nothing: a step has whole batches", "dataloader_drop_last"),
    # axes
    (
        (
            "tp tp_size tensor tensor_parallel tensor_parallel_size tensor_parallel_degree tensor_model_parallel_size "
            "model_parallel_size mp_size"
        ),
        "grid.tensor",
        "triax.Grid(tensor=...)",
    ),
    (
        (
            "pp pp_size pipe pipeline_parallel pipeline_parallel_size pipeline_parallel_degree num_stages "
            "pipeline_model_parallel_size"
        ),
        "grid.pipe",
        "triax.Grid(pipe=...)",
    ),
    (
        "dp dp_size data_parallel data_parallel_size data_parallel_degree data_parallel_replicate_degree replicas",
        "grid.data",
        "triax.Grid(data=...)",
    ),
    (
        "data_parallel_shard_degree sharding_strategy",
        "zero (what the replicas shard) and grid.data (their number)",
        "zero_optimization.stage (what the replicas shard)",
    ),
    (
        "cp cp_size context context_parallel context_parallel_size context_parallel_degree sequence_parallel_size",
        "grid.context",
        "triax.Grid(context=...)",
    ),
    (
        "ep ep_size expert expert_parallel expert_parallel_size expert_parallel_degree",
        "grid.expert",
        "triax.Grid(expert=...)",
    ),
    (
        "schedule pipeline pipeline_schedule pipeline_parallel_schedule",
        "schedule (of the pipeline), or training.learning_rate.schedule",
        "pipeline.schedule (of the pipeline), or scheduler (of the learning rate)",
    ),
    ("parallelism", "grid", "triax.Grid(pipe=..., tensor=..., data=...)"),
    (
        "device",
        "nothing: a run takes the GPUs that it sees, and the CPU if there are none",
        "triax.Grid(device=...)",
    ),
    # the model and the data
    (
        "model_name_or_path name_or_path pretrained_model_name_or_path model_path model.path hf_assets_path",
        "model.folder",
        "initialize(model=...)",
    ),
    ("preset flavor model.name model.type model.flavor model.size", "model.preset", "initialize(model=...)"),
    ("model", "model", "initialize(model=...)"),
    (
        "hidden_size n_embd num_layers num_hidden_layers n_layer num_heads num_attention_heads n_head vocab_size",
        "model.overrides (of a preset), with the names of its configuration",
        "nothing: the model of your script has it",
    ),
    ("lora_r lora_rank lora.r", "lora.rank", "lora.rank"),
    ("lora_alpha", "lora.alpha", "lora.alpha"),
    ("lora_dropout", "lora.dropout", "lora.dropout"),
    ("use_dora", "lora.dora", "lora.dora"),
    ("eval_data eval_dataset val_data validation_file eval_file", "data.validation", _LOOP),
    ("model.expert num_experts", "model.experts", "triax.moe.MoE(...) in the model"),
    (
        "dataset dataset_name dataset_path data_path train_file data.name data.path data.folder data.train",
        "data.training",
        "initialize(training_data=...)",
    ),
    # checkpoints, logs and evaluation
    (
        (
            "save_steps save_interval save_every save_freq checkpoint_interval checkpoint.interval checkpoint.freq "
            "checkpoint.steps checkpoint.save_steps"
        ),
        "checkpoint.every",
        "checkpoint.every",
    ),
    ("save_total_limit keep_latest_k max_to_keep keep_last", "checkpoint.keep", "checkpoint.keep"),
    ("resume resume_from resume_from_checkpoint", "checkpoint.resume", "checkpoint.resume"),
    (
        (
            "save_dir save_folder checkpoint_dir checkpoint_folder ckpt_dir checkpoint.dir checkpoint.path "
            "checkpoint.folder"
        ),
        "checkpoint.folder",
        "checkpoint.dir",
    ),
    ("async_save async_mode checkpoint.async_save", "checkpoint.background", "checkpoint.async"),
    ("output_dir dump_folder", "runs and name (a run's folder is runs/name)", "checkpoint.dir"),
    ("run_name experiment_name", "name", "json_monitor.job_name"),
    (
        (
            "logging_steps log_interval log_every log_freq log_every_n_steps steps_per_print monitor.interval "
            "monitor.every"
        ),
        "monitor.print_every",
        "steps_per_print",
    ),
    ("report_to metrics", "monitor", "tensorboard, csv_monitor or wandb"),
    ("tensorboard enable_tensorboard", "monitor.tensorboard", "tensorboard.enabled"),
    ("wandb enable_wandb", "monitor.wandb", "wandb.enabled"),
    (
        "eval_steps eval_interval eval_every evaluate.interval evaluate.steps evaluate.freq",
        "evaluate.every",
        _LOOP,
    ),
)
_COUNTERPARTS = {name: row for names, *row in ROWS for name in names.split()}


def counterpart(place: Sequence[str], key: str, in_training_file: bool) -> str | None:
    """Return what to write instead of another library's key; None if the key is of no library that is known here.

    Args:
        place: the names of the sections that lead to the key, from the outermost one.
        key: the key.
        in_training_file: the key stands in a training file, and not in a configuration.
    """
    name = key.lower().replace("-", "_")
    row = _COUNTERPARTS.get(f"{place[-1]}.{name}" if place else name, _COUNTERPARTS.get(name))
    return None if row is None else row[0 if in_training_file else 1]
