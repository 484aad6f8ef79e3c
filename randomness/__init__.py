"""Random numbers that do not depend on the grid.

random.py: initial weights and dropout masks, by the seed (``EngineOptions.seed``) and names or positions.
random_states.py: named states of the device's generator, which differ between tensor ranks.
"""
