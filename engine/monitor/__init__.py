"""Records of a run: numbers of each step, times, traces, reports and FLOPs profiles. It imports no engine.

The watch for ranks that hang is ``grid/agreement/hang_watch.py``.

An engine fills in the records of ``records.py``; the files here write, print and draw them. In reading order:

records.py      StepMetrics, StepRecord, RunRecord: the numbers and the timeline of a step, the description of a run
monitor.py      Monitor: hands each step's numbers to the writers and prints a line every few steps
writers.py      writers for CSV, metrics.jsonl, TensorBoard and Weights & Biases
run_json.py     writer of run.json
files.py        names of the files in a run's folder
step_timer.py   StepTimer: records the phases, ops and collectives of a step
step_record.py  a step's record from its marks, and the time of each part of it
wall_clock.py   table of monitor.breakdown
mfu.py          MFU: model FLOPs utilization, peaks of GPUs, tokens of a batch
format.py       numbers as text: counts, bytes, durations
trace/          traces of a step and of a job in Chrome's format, clock alignment between hosts, comms_logger
profiler/       FLOPs profiler: operations, parameters, memory and time of each module
report/         ``triax report``: a run's folder as one HTML page
"""
