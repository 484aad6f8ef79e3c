"""Grid of processes: topology, communicators, layouts of parameters, random numbers, errors, agreement between ranks.

- ``topology.py``: ranks, coordinates and process groups of a grid, without torch
- ``grid.py``: ``Grid``, this process on the grid: its axes, device, failure reports
- ``comm/``: ``Axis`` with all collectives, traffic counters, observers, pending operations
- ``layout.py``: ``Layout`` of a parameter: which dim the tensor axis shards, and how
- ``assemble.py``: whole tensors from the parts on all ranks, for saving and comparing
- ``ranges.py``: arithmetic of ranges and boxes, without torch
- ``random.py``: initial weights and dropout masks that do not depend on the grid
- ``random_states.py``: named states of the device's generator, which differ between tensor ranks
- ``loss_pair.py``: the pair (sum, weight) of a loss function
- ``auxiliary.py``: losses within the model, and the layers that have them
- ``agreement.py``: sums over all ranks, equality of facts, errors raised on every rank
- ``failure.py``: a rank that fails alone leaves the process group, so that the others stop
- ``call_order.py``: ranks that make the same collective calls in the same order, or an error on all of them
- ``hang_watch.py``: finds the rank that hangs, with its op and line
- ``mailbox.py``: texts that any rank posts for rank 0, without a collective
- ``replica_grid.py``: one replica as a grid, for local updates (DiLoCo)
- ``megatron.py``: the grid of Megatron's ``mpu``
- ``environment.py``: environment variables of torchrun, mpirun and srun
- ``devices.py``: GPUs of this machine, as text; functions of ``torch.cuda`` for the CPU
- ``checks.py``: checks of numbers, seeds and names of folders
- ``errors.py``: the errors of the library
- ``files.py``: reading of files from elsewhere: regular ones, and never a FIFO that has no writer
- ``records.py``: what a run writes about itself: an error of writing it never ends the run
- ``json_values.py``: plain Python values in JSON and back, for checkpoints and between ranks, without pickle
- ``nest.py``: walks over nests of tensors
- ``autograd.py``: marks in the graph, weak hooks, the casts of autocast
- ``dtypes.py``: names of dtypes
- ``source_hashes.py``: hashes of the files of Python modules
- ``safetensors.py``: writer of safetensors files, tensor by tensor
- ``lazy.py``: lazy public names of packages
"""

from .lazy import attach

VERSION = "0.1.0"  # here, because a checkout that is not installed has no metadata to ask

__getattr__, __dir__, __all__ = attach(__name__, __file__)
