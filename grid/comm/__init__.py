"""Communication of the grid: one ``Axis`` with all collectives, its spans, and pending operations.

- ``axis.py``: ``Axis``, the collectives and messages of the ranks along one axis of the grid
- ``regions.py``: collectives whose backward pass is the transposed one: copy / all-reduce, gather / split; of
  sequence parallelism: gather / reduce-scatter
- ``transport.py``: ``Transport``, by which an axis communicates: a process group directly
- ``host_transport.py``: ``HostTransport``, for ranks that share a GPU: by way of host memory
- ``pending.py``: handles of asynchronous operations: ``Pending``, ``Done``, ``All``, ``Then``
- ``lanes.py``: ``Lanes``: two passes that take turns, so that one computes while the other waits for its collective
- ``equal_facts.py``: ``same``: whether all ranks of an axis have equal facts
- ``traffic.py``: counters of the bytes sent, by axis and collective
- ``spans.py``: ``Spans``: the stream of what a rank does, which everything that measures a step reads
- ``comms_log.py``: reader of spans: durations of collectives and messages, for ``monitor.communication``
- ``timeline_recorder.py``: reader of spans: the file of one rank for ``triax run --timeline``
- ``clock.py``: times of events on one rank: CPU clock, or events in a GPU's stream
- ``simulated.py``: process groups of a dry run, which send nothing
- ``tcp_store.py``: stores that listen on one address alone
- ``thread_priority.py``: scheduling policy of gloo's threads
"""
