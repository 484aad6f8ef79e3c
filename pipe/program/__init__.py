"""Schedules and programs as values: made, lowered, verified, simulated and drawn, without torch.

ops.py             the ops: F, B, I, W; C (recompute); O, R (offload); SEND, RECV; GATHER, RELEASE, REDUCE (ZeRO); TIED
orders.py          Orders: the compute ops of each rank in order, and what follows from them
schedule.py        Schedule: orders as text, JSON, CSV and a picture
zero_bubble_log.py schedules as the zero-bubble repository prints them
slices.py          slices of a sequence: their lengths, costs and order
placement.py       the rank of each stage: loop (0 1 2 0 1 2), zigzag (0 1 2 2 1 0)
program.py         Program: a schedule with its messages, collectives and tied sums
passes.py          lower: schedule -> program, by passes that insert REDUCE, GATHER and RELEASE, TIED, SEND and RECV
deadlock.py        deadlock: the error of a schedule that hangs: which ranks wait for each other, and at which ops
verify.py          verify: proves completeness, order, memory limits and freedom from deadlock, or a counterexample
costs.py           Costs: seconds of the ops of each stage, alone and in a pair
activations.py     activations that each rank holds, on the device and on the host
timeline.py        Timeline: the start and end of each op, simulated or measured
simulate.py        simulate: costs -> timeline, makespan, bubble, peak activations
pairs.py           pair_pass: joins passes to pairs, in which each hides the collectives of the other
offload.py         offload_pass: inserts offloads and reloads of activations
recompute_pass.py  recompute_pass: inserts recomputations of activations
critical.py        CriticalPath: reason for the start time of each op, and the ops that set the makespan
layer_costs.py     LayerCosts: seconds and bytes of each layer of a list, from which a cut into stages is searched
measured_costs.py  costs_of: measured timelines -> costs
forward_only.py    forward_only: the schedule of inference and evaluation
colors.py          names and colors of the kinds of ops
svg.py             a timeline as SVG text, which a notebook shows
draw.py            timelines as text, as a picture, as a Chrome trace
chrome_trace.py    ChromeTrace: the writer of Chrome's trace format
"""
