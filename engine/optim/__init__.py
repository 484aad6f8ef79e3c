"""Optimizers and learning-rate schedules by name; checks of a step. The norm for clipping is in zero/gradient_norm.py.

optimizers.py: ``resolve``, from a type and its arguments to a class and its own arguments; names that are refused.
elementwise.py: Lion, and Adam without bias correction.
layerwise.py: LAMB and Muon, whose update of an element depends on its whole tensor.
schedulers.py: ``make_scheduler``, from a type and its parameters to a torch scheduler.
closed_form.py: ``ClosedFormSchedule``, whose rates depend on the number of steps alone.
signature.py: arguments checked against a class's signature.
trial_step.py: a trial step of an optimizer and a schedule, so that wrong arguments fail at once.
loss_scale.py: fp16's loss scaler; loss scales where backward passes run through several engines.
nonfinite.py: losses and gradients that are NaN or infinite: raise, skip or ignore.
"""
