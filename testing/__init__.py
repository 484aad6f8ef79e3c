"""Test kit for models of your own: ranks on this machine, and equality with one process.

plugin.py: the pytest plugin, which has the fixture ``ranks``.
pool.py: the pool of gloo ranks, ``RankFailure`` and ``RankTimeout``; rank_process.py: the program of a rank.
equality.py: ``assert_equals_one_process`` and ``assert_schedule``: numbers on grids and on one process.
covering.py: covering arrays; grids.py: ``covering_grids``, few grids in which every two choices meet.
sent_bytes.py: ``count_bytes``, the bytes that a rank sends.
check.py: the runs of ``triax check``, and what makes a number differ.
recording.py: the first module and op that differ; deferral.py: gradients that zero-bubble schedules cannot defer.
kept_bytes.py: bytes that each layer keeps for the backward pass.
strategies.py: hypothesis strategies for schedules, grids and numbers of microbatches.
"""

from ..base.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
