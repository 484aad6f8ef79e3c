"""ZeRO++: fewer bytes on the data axis. Wang et al. 2023 (arXiv:2306.10209).

options.py: the options that switch on qwZ, hpZ and qgZ, and the checks of these options
blocks.py: blockwise quantization to 8 and 4 bits
weight_gather.py: qwZ and hpZ: quantized all-gather of weights, secondary shards within a host
gradient_reduce.py: qgZ: quantized reduce-scatter of gradients by all-to-all, in one or two hops
traffic_formula.py: formula of the bytes that a step sends
host_groups.py: groups of replicas that share a host
"""
