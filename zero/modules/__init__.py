"""ZeRO for any ``nn.Module`` in a plain training loop, without a pipeline.

sharded_optimizer.py: ``ShardedOptimizer``, the optimizer of a plain loop
module_optimizer.py: its base, also of the engine's optimizer: parameter groups, state dict
backward_passes.py: gradient hooks: backward passes of a step, and the reductions within them
step_state.py: how far a step is: its last backward pass has begun, its gradients are reduced, it is taken
units.py: stage 3: the submodules that are units, and the parameters that each uses
unit_weights.py: stage 3: weights of units are gathered as long as a pass uses them
forward_passes.py: stage 3: forward passes and the order of their units, which backward passes follow
unit_backward.py: stage 3: weights of units are gathered for their backward, on all replicas in one order
unit_forward.py: stage 3: weights of units are gathered while they run, and marks are set for the backward pass
tiled_linear.py: ``TiledLinear``: a linear layer whose tiles are units of their own
leaf_modules.py: ``set_leaf_modules``: modules that are not cut into units
optimizer_arguments.py: checks of arguments, names of parameters, broadcast from the first replica
broadcast.py: equal weights on all replicas and tensor ranks at the start, for the engine of a module
"""
