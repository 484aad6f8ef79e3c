"""Formulas for planning a run, without a device and without processes.

layer_shapes.py      layers_of: parameters, products and attention sizes of each layer of a model
activations.py       bytes of a block's activations, by formula
local_sizes.py       elements per token of a block's tensors on one rank
layer_memory.py      LayerMemory: bytes of one layer on a rank, term by term
layers_by_kind.py    LayersByKind: the layers of each stage and pipe rank, by kind
state_memory.py      StateMemory: bytes of model states in ZeRO's buckets
memory.py            ModelMemory: bytes of each pipe rank by kind, on any layout
cached.py            cache of a method's results in its object
additive.py          records of numbers that are added field by field
parallel_layout.py   ParallelLayout: degrees, microbatch, schedule, ZeRO stage, recomputation
machine.py           Machine: speed of products, memory and links, with sources; MACHINES
measured.py          MeasuredTimes: times of kernels, collectives and Python by size, of ``triax machine measure``
collectives.py       seconds of rings, trees, all-to-alls and messages on the levels of a network
measure_machine.py   measure: these times, taken on this machine (this file alone needs torch)
work.py              Work: model, machine, batch and sequence
device_time.py       DeviceTime: seconds of products and kernels, by formula or by table
layer_time.py        LayerTimer: seconds of one microbatch in one layer, term by term
pass_time.py         PassTime, RankTime: seconds of the passes of layers, and of a pipe rank
zero_time.py         ZeroTime: seconds of the data axis and of the optimizer
schedule_time.py     ScheduleTime: seconds of a schedule by simulation; schedules with options
option_step.py       OptionStep: a step whose schedule has options, and what hides which collective
cores.py             seconds of a schedule whose ranks share the cores of one machine
core_step.py         CoreStep: a step on such ranks
imbalance.py         Imbalance: time that the replica with the most work takes longer than the mean
cost.py              CostModel: seconds of a step on a layout, by kind
fit.py               MeasuredRun, fit: a machine's figures from measured runs, and leave-one-out errors
trust.py             Trust: interval of a predicted time, by what is known of the machine
search.py            Searcher: the fastest layouts that fit, by exact lower bounds
tuning.py            Tuner: microbatch size and ZeRO stage of a configuration, confirmed by measured steps
picture.py, page.py  bars of memory and time as a picture, and as an HTML section
"""
