"""Formulas for planning a run, without torch and without processes.

formulas.py  bytes of model states, of activations and of ZeRO's communication, by the papers
"""
