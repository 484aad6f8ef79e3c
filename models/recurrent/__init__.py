"""Linear attention and state spaces as layers: a state of fixed size in place of keys and values.

sizes.py: sizes of the layers, as a part of a model's configuration; without torch.
mixer.py: ``RecurrentMixer``, what the layers share: projections, convolution, pieces of the sequence, generation.
mamba2.py: ``Mamba2``; delta_net.py: ``GatedDeltaNet``.
state_space.py, delta_rule.py: their recurrences, computed in chunks.
decays.py: decays between the tokens of a chunk; convolution.py: the short causal convolution.
initial.py: distributions of the initial decays and time steps.
"""
