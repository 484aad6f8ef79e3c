"""Hugging Face: weights and configurations in and out, and transformers' own models as lists of layers.

families.py: for each family a table of names, a few flags and the plan of ``parallelize``.
hybrids.py: settings and names of the recurrent layers of hybrids.
config.py: conversion of ``config.json`` to and from triax's configurations.
names.py: patterns of parameter names, expanded for a model.
mxfp4.py: weights of 4 bits, dequantized.
folder_settings.py: special tokens, generation settings and the tokenizer's files of a folder.
load.py: ``load_hf`` and ``config_from_hf``.
reader.py: reader of the weights in a folder or a live model; each rank reads only its slices.
save.py: ``save_hf``, which gathers one tensor at a time.
folder_writer.py: a folder of safetensors files and its index, written one tensor at a time.
adapters.py: PEFT's adapters: ``save_lora``, ``load_lora``, ``lora_config``.
merge.py: weights merged with adapters.
parallelize.py: ``triax.parallelize``, with the families' plans.
export.py: a checkpoint as a folder for ``from_pretrained``.
vision_layers.py: layers of a vision tower, in front of a language model's.
pipeline_layers.py: ``hf_layers``, transformers' own blocks over pipeline stages.
"""
