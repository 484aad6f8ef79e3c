"""Pipeline parallelism: a model as a list of layers, cut into stages along the pipe axis, and run by a schedule.

Describing the model:
    spec.py                 LayerSpec, TiedLayerSpec: layers that are built later, on the rank that runs them
    module.py               PipelineModule: the list of layers; cuts it into stages and runs this rank's
    layer_builder.py        builds one layer: its values depend on the seed and its index alone
    stage_layers.py         the layers of this rank's stages: built, shared, changed, named; dropped if a stage leaves
    rebuild.py              a PipelineModule built again, on another grid or as a copy
    partition.py            cuts the list into stages: uniform, balanced by parameters, by class, or given
    cuts.py                 find_cut: the cut, and the schedule, for the costs of the layers; without torch
    ties.py                 finds tied layers and weights (an embedding and its head) in the list
    placeholders.py         device="meta": parameters without values, filled one layer at a time

Scheduling, without torch:
    schedules/              generators (GPipe, 1F1B, interleaved, zero bubble, V-shaped, Hanayo), and the search
    program/                a schedule as a value; lowered to a program, verified, simulated, drawn

Running a step:
    microbatch.py           Microbatch: what one pass through the pipeline gets; its slices along the tokens
    microbatches.py         reads a batch's microbatches on the first and last stage; numbers their shapes
    fields.py               pairs and dicts of the data; sends labels and parts of the inputs to ranks that do not read
    losses.py               RunLosses: the losses of one run, and the roots of its backward passes
    executor.py             one loop over a program's ops: F, B, I, W, sends and receives, and the data axis's ops
    activation_offload.py   O and R: copies what autograd keeps to the host and back, beside the compute ops
    p2p.py                  sends and receives between stages
    schema.py               nested tuples, lists and dicts of tensors <-> a flat list of tensors to send
    stage_boundary.py       the start of a stage's autograd graph: collects the gradients of its inputs
    chunked_loss.py         output layer and loss in chunks of tokens: the logits are never whole
    backward.py             split backward (zero bubble): the input gradient now, the weight gradient later
    recompute/              activation checkpointing
"""

from ..base.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
