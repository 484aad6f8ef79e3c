"""Saving and loading of an engine's state as a ``Snapshot``. ``checkpoint/`` writes and reads the files.

checkpointer.py: ``Checkpointer``: ``save_checkpoint``, ``load_checkpoint``, automatic checkpoints.
capture.py: copies weights, optimizer state, buffers and counters from an engine into a Snapshot.
restore.py: loads a Snapshot into an engine.
kept_state.py: optimizer state of frozen parameters, kept from the checkpoint that was loaded to the next one.
residuals.py: saves and loads the residuals (error feedback) of gradient compression.
adapted.py: check that a checkpoint does not change the weights under a model's adapters.
load_weights.py: ``load_weights`` loads a checkpoint's weights into a model that has no engine.
"""
