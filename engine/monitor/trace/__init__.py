"""Traces for chrome://tracing and ui.perfetto.dev, and the log of communication.

trace.py            trace of one step of all ranks (``monitor.trace``, ``engine.record_trace``)
clock_offsets.py    alignment of the ranks' clocks, for one time axis
merge_timelines.py  timeline of a whole job (``triax run --timeline``), merged from the ranks' files
comms_logger.py     monitor.communication: latency and bandwidth of each collective, log_summary
"""
