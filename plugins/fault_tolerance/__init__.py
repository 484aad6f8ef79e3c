"""Replicas that leave and join a run at a step while the others train, with numbers that a replay repeats bit by bit.

membership.py: who contributed to which step, as a value: shares of samples, the history, its file
meeting.py: what replicas report at the end of each attempt of a step, and the decision that follows
identity.py: what must be equal on all replicas: options, model, functions, data, versions
secret_channel.py: messages between two processes that know the same secret
coordinator.py: the server that tells who is there, and notices a lost replica, whose heartbeats have ended
coordinator_client.py: its clients: meetings and heartbeats of a replica, the store of its ranks
contributors.py: the replicas that take shares of a step's samples, and those in its sum
replica_group.py: process group between replicas, made anew when they change, and its sum in a fixed order
round_link.py: connection of a rank to its place in the other replicas, one round after another
peer_state.py: weights, optimizer state and schedules from a peer's memory
shard_cut.py: cut of the optimizer state into parts, and the replicas that hold each, as a value
sharded_state.py: the step on parts, and parts that move (ZeRO over the replicas)
ledger_checkpoints.py: the ledger in a checkpoint
phase.py: where a replica stands with the run, and how far it is with a step, as a value
state_transfers.py: whole states under way between a replica and others
rounds.py: ``Rounds``: a replica meets the others, and follows their decision into the next round, or joins
run_record.py: the ledger with its file, lost time, and what the log says of other replicas
supported.py: the engines that are refused, and steps that change buffers
leave_signal.py: SIGTERM, after which a replica leaves
replicas.py: ``FaultTolerantReplicas``, the replica strategy: the order of a step
local_rounds.py: ``LocalRounds``, the replica strategy with local updates: members come and go between outer steps
strategy.py: what the engine finds by an entry point
"""
