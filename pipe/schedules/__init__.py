"""Generators of pipeline schedules, and the search for one. No torch.

classic.py      GPipe, 1F1B, eager 1F1B, interleaved 1F1B, looped breadth-first; forward only
zero_bubble.py  ZB-H1, ZB-H2: split backward, one stage per rank
v_shaped.py     ZB-V, V-Half, V-Min, DualPipe-V: two stages per rank in a V
v_steady.py     their steady states, one microbatch repeated each period
v_ends.py       their beginnings and ends, filled or squeezed
braided.py      STP: a V of pairs of passes, which hide each other's collectives
hanayo.py       Hanayo's waves: two or more stages per rank, to and fro
squeeze.py      list scheduling of a pattern of ops under a memory limit; v_ends, zero_bubble and classic use it
closed_forms.py idle times and activations in flight of the published schedules, as formulas
registry.py     RECIPES: name -> generator and facts of a schedule; named_schedule
search.py       `auto`: the best schedule found for given costs and memory; tune: a named one for given costs
steady.py       steady states for given costs and memory, from which the search starts
greedy.py       list scheduling with the real costs, from which the search starts
annealing.py    simulated annealing on orders of ops, for the search
fitting.py      find_fitting: `auto` with activations that are offloaded or recomputed
choose.py       make_schedule (public): a named schedule, `auto`, or a file
"""
