"""Counts and reports that look into an engine's buckets and stages.

Formulas are in ``plugins/plan/``, output in ``engine/monitor/``.

memory.py            bytes that a rank holds, by kind (``memory_report``)
traffic_formulas.py  bytes sent in a step, beside plan/'s formulas (``traffic_report``)
memory_breakdown.py  memory_breakdown: prints the bytes held around forward, backward and step
step_profile.py      flops_profiler: counts and times one step
torch_profile.py     monitor.profiler: torch.profiler of some steps, with the names of the spans
dump_state.py        dump_state: prints what each rank holds at start-up
run_description.py   record of a run for run.json
"""
