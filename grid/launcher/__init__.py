"""Launcher of ranks: torchrun's agent, started by ``triax run`` and ``launch()``, on one host or on several.

- ``launch.py``: ``launch``: starts the ranks of this host, reports which rank failed first and how
- ``worker.py``: one rank: runs its script or function, prints to its log file, writes down its failure
- ``signals.py``: signals to the launcher, and to ranks that start
- ``agent.py``: torchrun's agent, with restarts that all hosts count alike
- ``rendezvous.py``: rendezvous of one host; rendezvous and heartbeats of a fixed list of hosts
- ``elastic.py``: torch's rendezvous of hosts that join and leave, without its pickles
- ``run.py``: the ranks of ``triax run``: on this host, on hosts that this one drives, or as replicas
- ``program.py``: the program that they run
- ``placement.py``: hosts and processes that the options of ``triax run`` ask for
- ``hosts.py``: parser of the hostfile, ``--include`` and ``--exclude``
- ``remote.py``: starts a launcher on every host, by ssh or another command
- ``replica_jobs.py``: replicas as jobs of their own, each started again while the others train, and their coordinator
- ``log_tail.py``: shows the log files of ranks while they grow
"""
