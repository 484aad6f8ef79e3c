"""Hugging Face's Trainer over a triax engine: ``triax.Trainer`` and ``triax.TrainingArguments``.

training_arguments.py: ``TrainingArguments``: transformers' own, with ``triax=`` (DeepSpeed's dialect) and ``grid=``.
arguments.toml: the arguments that triax does not follow.
auto_values.py: the configuration's "auto" values, filled in from the arguments and the model.
trainer.py: ``Trainer``: transformers' loop; the engine runs forward, backward and step, and writes checkpoints.
batches.py: the rows of each replica, none of them twice at an epoch's end.
pipeline.py: the model's layers over pipe stages, batches for them, and their weights back in the model.
adapters.py: LoRA, of the configuration's section ``lora`` and of PEFT's models over pipe stages.
resume.py: the checkpoint folders of transformers' own Trainer, loaded into an engine.
state_dict.py: the model's full state dict on rank 0, gathered from ZeRO and tensor shards, for ``save_model``.
"""

from ...base.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
