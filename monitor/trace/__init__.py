"""Traces for chrome://tracing and ui.perfetto.dev, and the log of communication.

trace.py          trace of one step of all ranks (``timeline`` in the configuration, ``engine.record_trace``)
clock_offsets.py  alignment of the ranks' clocks, for one time axis
merge.py          timeline of a whole job (``triax run --timeline``), merged from the ranks' files
comms_logger.py   comms_logger: latency and bandwidth of each collective, log_summary
"""
