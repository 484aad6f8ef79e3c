"""Training engines: ``triax.Engine`` and its two kinds. This folder joins the parts of lower levels.

base.py                Engine: from a model and options to its parts; weights by name; the base class of both kinds
engines.py             Engine with both of its kinds
tune.py                ``triax.tune``: options with the sizes that fit in memory
keywords.py            types of the keywords of ``triax.Engine``
kinds.py               protocols of the two kinds of engines, for what watches them
pipeline_engine.py     PipelineEngine: ``train_batch`` and ``eval_batch`` of a ``PipelineModule``
module_engine.py       ModuleEngine: forward, ``backward`` and ``step`` of any ``nn.Module``
module_step.py         the calls of a microbatch, and the losses of a step, of a plain module
optimizer_step.py      OptimizerStep: sums loss and squares over ranks, the norm (zero/gradient_norm.py), division of
                       the loss: the one divisor of the gradients, by which zero/range_stepper.py divides them
replica_strategy.py    SynchronousReplicas: whose grid takes a step; plugins bring others (local SGD, fault tolerance)
replica_buffers.py     ReplicaBuffers: batch norm's statistics and other buffers, equal on all replicas
replica_rows.py        ReplicaRows: warning of replicas that train on the same rows
auxiliary_steps.py     sums of auxiliary losses and experts' loads over a step
named_losses.py        terms and metrics of a ``loss_fn`` that names its losses: weights before a batch, values after it
named_parameters.py    parameters with their whole-model names
step_observer.py       StepObserver: base class of observers of steps, which may leave a step out
recording_observer.py  records, prints and traces steps
instrument.py          autocast, profilers and loggers around the parts of a step
snapshot/              saving and loading: from an engine to a Snapshot and back
optim/                 optimizers and learning-rate schedules by name
monitor/               records, reports and traces of a run
setup/                 from options to the parts of an engine: precision, ZeRO's options, recomputation
accounting/            memory and traffic of a rank, counted beside the formulas; the profile of a step
"""

from ..base.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
