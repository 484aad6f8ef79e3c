"""Conversion of checkpoints to and from other formats. Those of other libraries are read by ``compat/``.

export.py: weights in one safetensors file, from a checkpoint or from a run
formats.py: formats that packages offer, such as hf (Hugging Face); the description of the model in a checkpoint
from_dcp.py, to_dcp.py: import from and export to torch.distributed.checkpoint (DCP)
dcp_folder.py, inert.py: readers of pickled files that run no code of them
whole_tensors.py: whole tensors of another library written as a checkpoint
"""
