"""Hugging Face: weights and configurations in and out, and transformers' own models as lists of layers.

families.py: the table of all families; a new family is one entry of a file below.
family.py: description of a family, and the keys and names that most families share.
sharding_plans.py: plans of ``parallelize``.
dense_families.py: families without experts.
mixture_families.py: mixtures of experts.
encoder_families.py: encoders of text and of images.
hybrid_families.py: hybrids of attention and recurrent layers.
hybrids.py: settings and names of the recurrent layers of hybrids.
config.py: conversion of ``config.json`` to and from triax's configurations.
names.py: patterns of parameter names, expanded for a model.
mxfp4.py: weights of 4 bits, dequantized.
folder_settings.py: special tokens, generation settings and the tokenizer's files of a folder.
load.py: ``load_hf`` and ``config_from_hf``.
reader.py: reader of the weights in a folder or a live model; each rank reads only its slices.
save.py: weights under Hugging Face's names, gathered one tensor at a time; ``save_hf``.
transfer.py: the same weights to an inference engine, over a process group.
folder_writer.py: a folder of safetensors files and its index, written one tensor at a time.
adapters.py: PEFT's adapters: ``save_lora``, ``load_lora``, ``lora_config``.
merge_adapters.py: weights merged with LoRA adapters.
parallelize.py: ``triax.parallelize``, with the families' plans.
export.py: a checkpoint as a folder for ``from_pretrained``.
vision_layers.py: layers of a vision tower, in front of a language model's.
patch_layers.py: the same for images of any size: Qwen2-VL, Qwen2.5-VL and Qwen3-VL.
pipeline_layers.py: ``hf_layers``, transformers' own blocks over pipeline stages.
"""
