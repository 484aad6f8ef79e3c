"""Random numbers that do not depend on the grid.

random.py: initial weights and dropout masks, by names or positions and the seed: ``PipelineModule(seed=...)`` (in
    pipe/module.py), or ``EngineOptions.seed`` (in engine/module_engine.py) of a plain module.
random_states.py: named states of the device's generator, which differ between tensor ranks.
"""
