"""Local SGD, DiLoCo and asynchronous DiLoCo: replicas take optimizer steps of their own and synchronize now and then.

strategy.py: what the engine finds by an entry point: the grid of a replica's steps, and the strategy
replica_grid.py: the ranks of one replica as a grid
local_replicas.py: ``LocalReplicas``, the replica strategy: whose grid takes a step, when to synchronize, leaving
outer_optimizer.py: local SGD's mean of weights and DiLoCo's outer Nesterov step (synchronous)
async_diloco.py: DiLoCo in numbered rounds without waiting: messages, status of each replica, staleness bound
mean_state.py: weights and optimizer state in a checkpoint: the mean over the replicas
replica_checkpoints.py: each replica's own state in a checkpoint
"""
