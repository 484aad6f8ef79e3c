"""Types of sharding: what each tensor of a layer is on each axis, without ranks: ``triax check --types tensor=8``.

sharding.py      the type of a tensor on an axis
rules.py         the type of an op's result, and inputs that do not fit; ops.toml: the families of ops
borders.py       what each of the six borders takes and returns
tracer.py        the types of all tensors of one rank's forward pass
group.py         process group that sends nothing and tells of each collective
findings.toml    what is missing where inputs do not fit, and what mends it
check_types.py   ``check_types``: one rank of a grid of any size, layer by layer
"""
