"""Random numbers that do not depend on the grid.

random.py: initial weights, by ``PipelineModule(seed=...)`` and names; dropout masks, by ``EngineOptions.seed``, which
    engine/pipeline_engine.py and engine/module_engine.py set, and positions.
random_states.py: named states of the device's generator, which differ between tensor ranks.
"""
