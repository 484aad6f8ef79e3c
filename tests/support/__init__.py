"""What test files share: models, runs of them, references of plain PyTorch, faults and machines.

``from support.toys import mean_loss``: pytest has tests/ on its path, and ranks find what pytest finds.

Models, batches and comparison
    toys.py: small losses, batches, texts of errors, ``same`` with the bound 1e-10
    gpt_batches.py, tokenized.py, toy_answers.py: token ids and labels, tokenized folders, prompts with answers
    toy_families.py, huggingface_models.py, varied_llama.py, vision_models.py: random models of transformers
    differences.py: the largest of several differences, and NaN among them
    encoder_models.py, encoder_decoder_models.py: encoders, T5s, Whispers, batches, steps by transformers and on a grid
    bug_models.py, recompute_layers.py, torch_layers.py: layers with a fault, layers that count, layers of torch
    hub_cache.py: the Hugging Face Hub without a network

Training on ranks
    training.py: ``train`` of a pipeline, ``train_module``, ``train_plain`` of one process, in one form: ``Step``; their
        models, engines and configurations: ``tiny_gpt``, ``pipeline_engine``, ``module_engine``, ``small_config``
    rank_checks.py: errors of every rank, warnings that triax logs, float64 by default
    pipeline_jobs.py, module_training.py, module_jobs.py: small pipelines and plain modules, and their engines
    checkpoint_jobs.py, small_checkpoints.py: jobs that are saved, loaded and compared; engines of one layer, indices
    sharded_loops.py, gradient_loops.py, quantized_layers.py: loops with ShardedOptimizer, engines of ZeRO++
    local_training.py, replica_jobs.py: replicas that step alone, replicas as processes that tests kill
    diffusion_runs.py: diffusion transformers on any grid
    decoder_runs.py, five_axes.py: decoders on any grid, one model on any grid of five axes, beside one process
    compositions.py: a random composition of layers, grid and options
    generating_models.py: models that generate
    file_runs.py: runs of training files, and the numbers that they write
    image_runs.py: vision-language folders with processors, pictures and their captions, for runs of training files
    method_steps.py, method_runs.py: steps of post-training methods beside a reference, runs of their training files
    sharding_plans.py, lora_runs.py, trainer_jobs.py: plans, adapters, the Trainer

References that share nothing with triax
    reference.py, moe_reference.py, mtp_reference.py: GPT, Llama, experts and multi-token prediction in plain PyTorch
    compression_references.py, onebit_references.py, foreign_optimizers.py: compression and optimizers by their papers
    paper_formulas.py, published_runs.py, planned_traffic.py: memory, times and bytes by their papers and tables
    exact_schedules.py: optimal schedules by a solver of constraints
    schedule_runner.py: schedules executed op by op
    exact_norms.py, trainer_in_float64.py, trl_in_float64.py: transformers and TRL without their roundings
    horovod_models.py, horovod_example.py, deepspeed_arguments.py, configuration_files.py: Horovod's and DeepSpeed's

Machines and faults
    simulated_device.py, simulated_nccl.py, simulated_order.py: an accelerator without a GPU; waits and copies counted
    failing_disk.py, network_namespaces.py, planted_faults.py: a full disk, two hosts, faults in the library's text
    sharding_faults.py: thirty layers of users with a mistake of sharding each, and the right twin of each
    resident.py, peak_memory_program.py: memory of processes
    measured_machine.py: a machine as ``triax machine measure`` describes it
    shrink.py, sweeps.py: the smallest case that still fails; which cells of a sweep are in each run

Programs and documents
    processes.py, launched_scripts.py, command_line.py: processes, ports, scripts, the command ``triax`` in this process
    readme_blocks.py: code blocks of a Markdown page
    import_reader.py: imports of the library, and the levels of its rooms
    paths.py, versions.py: folders of this checkout, the library's version
"""
