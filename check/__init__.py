"""Check of a model on grids: ``triax check script.py:build`` says whether it computes as on one process, and where not.

check.py: ``check``: runs on one process and on grids, compares them, and returns a ``Report``.
target.py: the user's model and batch: a function of a script, a training file, a Hugging Face folder.
grids.py: the grids that are tried, one axis at a time, then a combination.
run.py: one run on one rank: its losses, gradients, weights and recorded values.
recording.py: hooks that record what each layer, module and op returns, and the gradients.
costs.py: time and activation bytes of each layer, and parameters whose gradient cannot be deferred.
matching.py: the relation of the ranks' tensors to the whole tensor: equal, parts of it, terms of a sum, a multiple.
locate.py: the first layer, module and op that differ, and the first gradient.
causes.py: what usually causes a difference, from what is seen of it.
dry.py: a step of each class of ranks without values, for ``--dry``.
report.py: the result as a table and as JSON.
"""
