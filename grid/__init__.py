"""Grid of processes: topology, communicators, layouts of parameters.

- ``topology.py``: ranks, coordinates and process groups of a grid, without torch
- ``grid.py``: ``Grid``, this process on the grid: its axes, device, failure reports
- ``comm/``: ``Axis`` with all collectives, traffic counters, spans, pending operations
- ``layout.py``: ``Layout`` of a parameter: which dim the tensor axis shards, and how
- ``assemble.py``: whole tensors from the parts on all ranks, for saving and comparing
- ``ranges.py``: arithmetic of ranges and boxes, without torch
- ``loss_pair.py``: the pair (sum, weight) of a loss function
- ``loss_terms.py``: ``Loss``: named terms of a loss, and metrics; ``WithLoss``: those of a layer
- ``auxiliary.py``: losses within the model, and the layers that have them
- ``environment.py``: environment variables of torchrun, mpirun and srun
- ``devices.py``: GPUs of this machine, as text; functions of ``torch.cuda`` for the CPU
"""

from ..base.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
