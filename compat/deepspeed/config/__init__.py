"""The configuration: DeepSpeed's JSON, one table over triax's options. A key acts, or is refused with the reason.

keys.toml: the table: one row for each key, with the option that it sets, or the reason why it does nothing or is
    refused. Its head explains the rows.
table.py: the rows as objects; the key of each option.
read.py: from a dict or a file to a checked ``Section``, by the rows.
checks.py: keys that contradict one another.
to_options.py: ``parse_config``; the options that a configuration sets; ``batch_sizes``; notes.
optimizer_names.py, optimizers.toml: optimizers by DeepSpeed's names and arguments, as triax's.
elasticity.py: ``elasticity``: a batch size for many numbers of replicas.
document.py: the configuration with all defaults, its JSON schema, and the table of keys.
dialect.py: keys of the configuration in a training file's section ``deepspeed``.
"""
