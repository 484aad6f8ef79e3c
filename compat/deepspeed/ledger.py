"""The ledger: every public name of DeepSpeed 0.19, with its place in triax, or the reason why triax does not have it.

``PRESENT``: module of DeepSpeed -> module of triax or torch -> the names that it answers; ``A=B``: its name of A is B.
    Under ``=``: names of keys, whose value is the name in small letters, or B.
``ABSENT``: module of DeepSpeed -> sentence -> the names that raise it; ``*``: all other names of the module.
``ABSENT_MODULES``: module of DeepSpeed -> the sentence that its import raises.
``ALIASES``: DeepSpeed's second paths to a module.

docs/deepspeed.md prints the table, which ``markdown`` returns.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

VERSION = "0.19.8"  # of DeepSpeed, whose names these are
MAJOR, MINOR, PATCH = map(int, VERSION.split("."))
SOURCE = "[none]"  # what DeepSpeed says of its commit where it was built without git, so that scripts can log it

ALIASES = {
    "runtime.zero": "zero",
    "runtime.pipe": "pipe",
    "runtime.activation_checkpointing.checkpointing": "checkpointing",
    "comm.comm": "comm",
    "comm.torch": "comm",
    "accelerator.real_accelerator": "accelerator",
    "accelerator.abstract_accelerator": "accelerator",
    "profiling.flops_profiler.profiler": "profiling.flops_profiler",
    "zero.partition_parameters": "zero",
    "zero.tiling": "zero",
    "utils.init_on_device": "utils",
    "utils.nvtx": "utils",
    "utils.module_utils": "utils",
    "compression.helper": "utils",
    "ops.adam.fused_adam": "ops.adam",
    "ops.adam.cpu_adam": "ops.adam",
    "ops.lion.cpu_lion": "ops.lion",
    "ops.lion.fused_lion": "ops.lion",
    "ops.adagrad.cpu_adagrad": "ops.adagrad",
    "ops.lamb.fused_lamb": "ops.lamb",
}

_GROUPS = (
    "get_tensor_model_parallel_group get_model_parallel_group get_data_parallel_group "
    "get_tensor_model_parallel_world_size get_model_parallel_world_size get_tensor_model_parallel_rank "
    "get_model_parallel_rank get_tensor_model_parallel_src_rank get_data_parallel_world_size get_data_parallel_rank"
)

PRESENT = {
    "": {
        "compat.deepspeed.accelerator": "get_accelerator",
        "compat.deepspeed.arguments": "add_config_arguments init_distributed",
        "compat.deepspeed.configuration": "DeepSpeedConfig TORCH_DISTRIBUTED_DEFAULT_PORT",
        "compat.deepspeed.context": "initialize",
        "compat.deepspeed.pipeline_arguments": "PipelineModule=DeepSpeedPipelineModule",
        "compat.deepspeed.ledger": (
            "__version__=VERSION version=VERSION __version_major__=MAJOR __version_minor__=MINOR "
            "__version_patch__=PATCH "
            "__git_hash__=SOURCE __git_branch__=SOURCE"
        ),
        "compat.deepspeed.modules": "install",
        "compat.deepspeed.utils": "OnDevice log_dist logger",
        "compat.deepspeed": "dist=comm",
        "data.dataloader": "RepeatingLoader DeepSpeedDataLoader=Loader",
        "compat.deepspeed.engine": "DeepSpeedConfigError DeepSpeedEngine PipelineEngine=DeepSpeedPipelineEngine",
        "compat.deepspeed.inference": (
            "init_inference default_inference_config DeepSpeedInferenceConfig tp_model_init "
            "InferenceEngine=DeepSpeedInferenceEngine"
        ),
    },
    "accelerator": {
        "compat.deepspeed.accelerator": (
            "DeepSpeedAccelerator get_accelerator set_accelerator is_current_accelerator_supported"
        )
    },
    "checkpointing": {
        "compat.deepspeed.checkpointing": (
            "configure checkpoint non_reentrant_checkpoint is_configured reset partition_activations_in_checkpoint "
            "set_num_layers get_cuda_rng_tracker model_parallel_cuda_manual_seed model_parallel_reconfigure_tp_seed"
        ),
        "randomness.random_states": "CudaRNGStatesTracker=RandomStates",
    },
    "checkpoint.utils": {"compat.deepspeed.utils": "clone_tensors_for_torch_save"},
    "comm": {
        "torch.distributed": (
            "is_available is_initialized destroy_process_group new_group ProcessGroup ReduceOp GroupMember group P2POp "
            "all_gather all_gather_into_tensor all_gather_object all_reduce all_to_all all_to_all_single barrier "
            "batch_isend_irecv broadcast broadcast_object_list gather scatter send recv isend irecv monitored_barrier "
            "reduce reduce_scatter reduce_scatter_tensor get_rank get_world_size allgather_fn=all_gather_into_tensor "
            "reduce_scatter_fn=reduce_scatter_tensor inference_all_reduce=all_reduce "
            "get_all_ranks_from_group=get_process_group_ranks has_all_gather_into_tensor=is_available "
            "has_reduce_scatter_tensor=is_available"
        ),
        "compat.deepspeed.comm": (
            "init_distributed log_summary get_local_rank get_world_group get_global_rank initialize_mesh_device"
        ),
    },
    "constants": {"compat.deepspeed.configuration": "TORCH_DISTRIBUTED_DEFAULT_PORT"},
    "git_version_info": {"compat.deepspeed.ledger": "version=VERSION"},
    "inference": {"compat.deepspeed.inference": "DeepSpeedInferenceConfig DeepSpeedTPConfig"},
    "inference.config": {
        "compat.deepspeed.inference": (
            "DeepSpeedInferenceConfig DeepSpeedTPConfig DeepSpeedMoEConfig QuantizationConfig "
            "InferenceCheckpointConfig BaseQuantConfig QKVQuantConfig WeightQuantConfig=BaseQuantConfig "
            "ActivationQuantConfig=BaseQuantConfig"
        )
    },
    "inference.engine": {"compat.deepspeed.inference": "InferenceEngine=DeepSpeedInferenceEngine"},
    "moe.layer": {"compat.deepspeed.moe": "MoE=DeepSpeedMoE"},
    "moe.utils": {
        "compat.deepspeed.utils": "is_moe_param has_moe_layers split_params_into_different_moe_groups_for_optimizer"
    },
    "monitor.monitor": {"compat.deepspeed.monitors": "MonitorMaster"},
    "monitor.tensorboard": {"compat.deepspeed.monitors": "TensorBoardMonitor"},
    "monitor.csv_monitor": {"compat.deepspeed.monitors": "csvMonitor"},
    "monitor.wandb": {"compat.deepspeed.monitors": "WandbMonitor"},
    "monitor.config": {
        "compat.deepspeed.section_classes": "TensorBoardConfig CSVConfig WandbConfig DeepSpeedMonitorConfig",
    },
    "launcher.runner": {
        "compat.deepspeed.runner": "DLTS_HOSTFILE fetch_hostfile parse_inclusion_exclusion encode_world_info"
    },
    "ops.adam": {"compat.deepspeed.optimizer_classes": "FusedAdam DeepSpeedCPUAdam"},
    "ops.adagrad": {"compat.deepspeed.optimizer_classes": "DeepSpeedCPUAdagrad"},
    "ops.lamb": {"optim.layerwise": "FusedLamb=Lamb"},
    "ops.lion": {"compat.deepspeed.optimizer_classes": "DeepSpeedCPULion FusedLion"},
    "pipe": {
        "": "LayerSpec TiedLayerSpec",
        "compat.deepspeed.pipeline_arguments": "PipelineModule=DeepSpeedPipelineModule",
        "compat.deepspeed.process_topology": "ProcessTopology",
    },
    "pipe.engine": {"compat.deepspeed.engine": "PipelineEngine=DeepSpeedPipelineEngine DeepSpeedEngine"},
    "pipe.module": {
        "": "LayerSpec TiedLayerSpec",
        "compat.deepspeed.pipeline_arguments": "PipelineModule=DeepSpeedPipelineModule",
    },
    "pipe.topology": {
        "compat.deepspeed.grids": "PipelineParallelGrid=ParallelGrid",
        "compat.deepspeed.process_topology": "ProcessTopology PipeDataParallelTopology PipeModelDataParallelTopology",
    },
    "profiling.flops_profiler": {
        "monitor.profiler": "FlopsProfiler get_model_profile",
    },
    "runtime.config": {
        "compat.deepspeed.configuration": "DeepSpeedConfig",
        "compat.deepspeed.engine": "DeepSpeedConfigError",
    },
    "runtime.dataloader": {"data.dataloader": "RepeatingLoader DeepSpeedDataLoader=Loader"},
    "runtime.engine": {"compat.deepspeed.engine": "DeepSpeedEngine"},
    "runtime.fp16.onebit.adam": {"gradient_compression.onebit.adam": "OnebitAdam=OneBitAdam"},
    "runtime.fp16.onebit.lamb": {"gradient_compression.onebit.lamb": "OnebitLamb=OneBitLamb"},
    "runtime.fp16.onebit.zoadam": {"gradient_compression.onebit.adam": "ZeroOneAdam"},
    "runtime.lr_schedules": {
        "optim.lr_schedules": "LRRangeTest OneCycle WarmupLR WarmupDecayLR WarmupCosineLR",
        "=": (
            "LR_RANGE_TEST=LRRangeTest ONE_CYCLE=OneCycle WARMUP_LR=WarmupLR WARMUP_DECAY_LR=WarmupDecayLR "
            "WARMUP_COSINE_LR=WarmupCosineLR LR_RANGE_TEST_MIN_LR LR_RANGE_TEST_STEP_RATE LR_RANGE_TEST_STEP_SIZE "
            "LR_RANGE_TEST_STAIRCASE CYCLE_FIRST_STEP_SIZE CYCLE_FIRST_STAIR_COUNT CYCLE_SECOND_STEP_SIZE "
            "CYCLE_SECOND_STAIR_COUNT DECAY_STEP_SIZE CYCLE_MIN_LR CYCLE_MAX_LR DECAY_LR_RATE CYCLE_MIN_MOM "
            "CYCLE_MAX_MOM DECAY_MOM_RATE WARMUP_MIN_LR WARMUP_MAX_LR WARMUP_NUM_STEPS WARMUP_TYPE "
            "WARMUP_LOG_RATE=log WARMUP_LINEAR_RATE=linear WARMUP_MIN_RATIO COS_MIN_RATIO TOTAL_NUM_STEPS"
        ),
        "compat.deepspeed.configuration": "VALID_LR_SCHEDULES",
    },
    "runtime.utils": {
        "compat.deepspeed.utils": (
            "see_memory_usage set_random_seed move_to_device ensure_directory_exists is_model_parallel_parameter"
        ),
    },
    "utils": {
        "compat.deepspeed.zero": "z3_leaf_parameter",
        "zero.modules.leaf_modules": (
            "set_z3_leaf_modules=set_leaf_modules unset_z3_leaf_modules=unset_leaf_modules "
            "get_z3_leaf_modules=leaf_modules set_z3_leaf_modules_by_name=set_leaf_modules_by_name "
            "set_z3_leaf_modules_by_suffix=set_leaf_modules_by_suffix"
        ),
        "zero.modules.units": "set_z3_leaf_module=set_leaf z3_leaf_module=is_leaf",
        "compat.deepspeed.fragments": (
            "safe_get_full_fp32_param safe_get_full_grad safe_get_full_optimizer_state safe_set_full_fp32_param "
            "safe_set_full_grad safe_set_full_optimizer_state safe_get_local_fp32_param safe_get_local_grad "
            "safe_get_local_optimizer_state safe_set_local_fp32_param safe_set_local_grad "
            "safe_set_local_optimizer_state safe_update_full_grad_vectorized"
        ),
        "compat.deepspeed.utils": (
            "OnDevice instrument_w_nvtx log_dist log_dist_once logger recursive_getattr recursive_setattr "
            "set_log_level_from_string"
        ),
        "data.dataloader": "RepeatingLoader",
        "compat.deepspeed.groups": _GROUPS,
    },
    "utils.groups": {
        "compat.deepspeed.groups": f"{_GROUPS} "
        "_get_data_parallel_group _get_data_parallel_group_ranks _get_data_parallel_rank _get_data_parallel_world_size "
        "_get_model_parallel_world_size _get_broadcast_src_rank _get_sequence_parallel_group "
        "_get_sequence_parallel_rank _get_sequence_parallel_world_size _get_sequence_data_parallel_group "
        "_get_sequence_data_parallel_rank _get_sequence_data_parallel_world_size _get_expert_parallel_group "
        "_get_expert_parallel_group_ranks _get_expert_parallel_rank _get_expert_parallel_src_rank "
        "_get_expert_parallel_world_size _get_expert_data_parallel_group _get_expert_data_parallel_group_ranks "
        "_get_expert_data_parallel_rank _get_expert_data_parallel_world_size _get_expert_broadcast_src_rank"
    },
    "utils.logging": {"compat.deepspeed.utils": "log_dist log_dist_once logger set_log_level_from_string"},
    "utils.timer": {
        "compat.deepspeed.timers": "SynchronizedWallClockTimer=WallClockTimers ThroughputTimer",
    },
    "utils.z3_leaf_module": {
        "compat.deepspeed.zero": "z3_leaf_parameter",
        "zero.modules.leaf_modules": (
            "set_z3_leaf_modules=set_leaf_modules unset_z3_leaf_modules=unset_leaf_modules "
            "get_z3_leaf_modules=leaf_modules set_z3_leaf_modules_by_name=set_leaf_modules_by_name "
            "set_z3_leaf_modules_by_suffix=set_leaf_modules_by_suffix"
        ),
        "zero.modules.units": "set_z3_leaf_module=set_leaf z3_leaf_module=is_leaf",
    },
    "utils.zero_to_fp32": {
        "compat.deepspeed.fp32_state_dict": (
            "convert_zero_checkpoint_to_fp32_state_dict get_fp32_state_dict_from_zero_checkpoint "
            "load_state_dict_from_zero_checkpoint"
        )
    },
    "zero": {
        "compat.deepspeed.zero": (
            "GatheredParameters Init ZeroParamStatus register_external_parameter unregister_external_parameter"
        ),
        "zero.modules.tiled_linear": "TiledLinear TiledLinearReturnBias",
    },
    "zero.config": {
        "compat.deepspeed.section_classes": (
            "DeepSpeedZeroConfig DeepSpeedZeroOffloadParamConfig DeepSpeedZeroOffloadOptimizerConfig"
        )
    },
    "zero.offload_config": {
        "compat.deepspeed.section_classes": ("DeepSpeedZeroOffloadParamConfig DeepSpeedZeroOffloadOptimizerConfig"),
        "compat.deepspeed.configuration": "OffloadDeviceEnum",
        "compat.deepspeed.offload_states": "OffloadStateTypeEnum",
    },
    "zero.offload_states": {"compat.deepspeed.offload_states": "get_state_devices"},
}

HYBRID = (
    "triax has no hybrid engine: train with initialize, and generate with triax.init_inference over the engine's module"
)
KERNELS = (
    "triax has no kernels of its own for a transformer's layer: use the layers of triax.models, or "
    "torch.nn.functional.scaled_dot_product_attention and torch.compile"
)
INJECTION = (
    "triax does not replace a model's layers by kernels: triax.parallelize(model, grid, plan) shards the layers of any "
    "module over tensor ranks, and triax.hf_layers(model) lists a transformers model's blocks for pipeline stages"
)
AUTOTP = (
    "tensor_parallel.autotp_size in the configuration shards the model in initialize, by its family's plan or by "
    "partition_config; triax.parallelize(model, grid, plan) shards any module"
)
FASTGEN = "triax has no FastGen: init_inference and triax.InferenceEngine generate with continuous batches"
TUNER = (
    "the configuration's autotuning section finds microbatch and ZeRO stage; triax plan searches for the whole layout"
)
ELASTIC = (
    "the configuration's elasticity section chooses the batch sizes, triax config FILE prints them with the numbers of "
    "replicas that fit, and triax run --nnodes MIN:MAX lets hosts join and leave: docs/launch.md"
)
BUILDERS = "triax compiles no operators: it uses torch's kernels, so there is nothing to build"
GLOBALS = "triax's grid reads the launcher's environment: start with triax run or torchrun, and call init_distributed()"
COALESCED = "torch.distributed has no coalesced collectives for gloo: call all_gather or all_reduce for each tensor"
COMM_LOG = (
    "the engine logs its communication: set comms_logger.enabled in the configuration, and call "
    "deepspeed.comm.log_summary()"
)
FILES = (
    "triax's checkpoint files differ from DeepSpeed's: docs/checkpoints.md describes them, and the command "
    "triax checkpoint import reads DeepSpeed's universal checkpoints"
)
WRITERS = (
    'triax has one writer of checkpoints: "checkpoint": {"async": true} in the configuration makes it asynchronous, '
    "and docs/checkpoints.md describes the files"
)
COMPILE = (
    'triax has no DeepCompile: write "compile": true in the configuration, which compiles each layer by torch.compile'
)
PROFILE = (
    "triax counts operations with torch's own counter: call get_model_profile, or "
    "FlopsProfiler(model).print_model_profile"
)
DUALPIPE = 'write PipelineModule, and "pipeline": {"schedule": "dualpipe-v"} in the configuration'
MUON = 'write "optimizer": {"type": "Muon"} in the configuration'
LORA = 'the configuration\'s "lora" section trains low-rank updates of any model: docs/lora.md'
INTERNAL = "this name is internal to DeepSpeed: triax's engine does this work itself"
FRAGMENT = "read and write shards of parameters with the functions safe_get_* and safe_set_* of deepspeed.utils"
GROUPS = (
    "process groups belong to the engine's grid: engine.grid.data, engine.grid.tensor and engine.grid.pipe have "
    "rank, size and ranks"
)
ROLLOUT = "triax has no engine of rollouts: generate with init_inference over the engine's module"
ULYSSES = 'triax shards a sequence over its context axis: Grid(context=N), and attention="ulysses" in docs/context.md'
DATA = "triax has no data efficiency library: pass a dataset in your own order, or your own loader"
RANDOM_LTD = "triax has no random layer-token dropping"
NVME_TOOLS = "triax does not measure disks: zero_optimization.offload_optimizer sets the offload to a disk"
PINNING = "use torch's tensor.pin_memory(), or set pin_memory in zero_optimization.offload_optimizer"
SCIENCE = "triax has no kernels of DeepSpeed4Science: use torch.nn.functional.scaled_dot_product_attention with a mask"
FP8 = "triax has none of these 8-bit kernels: it trains and generates in float32, bfloat16 and float16"
ZENFLOW = "triax has no ZenFlow: zero_optimization.offload_optimizer overlaps its transfers with the step"
SUPEROFFLOAD = "triax has no SuperOffload: zero_optimization.offload_optimizer overlaps its transfers with the step"
SPARSE = 'the configuration\'s "sparse_attention" section sets a pattern of sparse attention: docs/context.md'
COMPRESSION = "DeepSpeed has removed its compression library; triax has none"
AUTOCAST = 'the configuration\'s "torch_autocast" section sets autocast: docs/autocast.md'
ACTIVATIONS = 'the configuration\'s "activation_checkpointing" section offloads activations: docs/recompute.md'
SCHEDULE = (
    "triax's schedules are not classes of instructions: set pipeline.schedule to a schedule's name, or write your own "
    "schedule (docs/extending/schedule.md); the command triax schedule draws a schedule"
)
MASTERS = "the engine holds the master weights: engine.optimizer is a torch.optim.Optimizer"
LAUNCHER = "use triax run, which takes the options of DeepSpeed's launcher: docs/launch.md"
MEMORY = "the command triax memory computes the memory of the model states in each ZeRO stage"

ABSENT = {
    "": {
        DUALPIPE: "DualPipeVEngine DualPipeVModule",
        MUON: "MUON_OPTIMIZER set_optimizer_flags resolve_per_head_muon_after_sharding",
        "triax has no head layouts, because its Muon does not split matrices by heads": (
            "QUERY KV MLA_Q MLA_KV NOT_HEAD_BLOCKED"
        ),
        HYBRID: "DeepSpeedHybridEngine",
        INJECTION: "replace_transformer_layer",
        KERNELS: "DeepSpeedTransformerLayer DeepSpeedTransformerConfig HAS_TRITON",
        AUTOTP: ("set_autotp_mode load_ds_config merge_tp_model_init_into_config record_tp_model_init_args"),
        "triax has no git hash: deepspeed.version is the version of DeepSpeed whose names triax has": (
            "git_hash git_branch"
        ),
        "write the type of the argument itself, Callable[[list], torch.optim.Optimizer]": "DeepSpeedOptimizerCallable",
        "write the type of the argument itself, Callable[[torch.optim.Optimizer], LRScheduler]": (
            "DeepSpeedSchedulerCallable"
        ),
        "write torch.optim.Optimizer, which is the class of engine.optimizer": "DeepSpeedOptimizer",
    },
    "checkpoint": {FILES: "*"},
    "checkpointing": {
        "to recompute a function, call deepspeed.checkpointing.checkpoint(function, *args)": "CheckpointFunction"
    },
    "comm": {
        COMM_LOG: (
            "configure timed_op reset_log has_comm_data get_comm_operation_count get_logged_comm_ops comms_logger "
            "timers timer_summary get_default_args get_tensor_position get_tensor_kwarg get_msg_size_from_args "
            "get_debug_log_name"
        ),
        GLOBALS: (
            "mpi_discovery in_aml in_aws_sm in_dlts patch_aml_env_for_torch_nccl_backend "
            "patch_aws_sm_env_for_torch_nccl_backend get_local_rank_from_launcher get_world_rank_from_launcher "
            "get_world_size_from_launcher"
        ),
        COALESCED: "all_gather_coalesced all_reduce_coalesced has_all_reduce_coalesced has_coalescing_manager",
        "torch.distributed chooses the backend: init_distributed(dist_backend=...)": (
            "init_deepspeed_backend set_backend cdb nccl_backend mpi_backend ccl_backend hccl_backend TorchBackend "
            "enable_symm_mem_for_group"
        ),
    },
    "compile.custom_ops": {COMPILE: "*"},
    "compression": {COMPRESSION: "*"},
    "constants": {GLOBALS: "CROSS_RANK CROSS_SIZE"},
    "env_report": {"use the command triax env": "*"},
    "inference": {
        FASTGEN: "RaggedInferenceEngineConfig InferenceEngineV2 build_hf_engine build_engine_from_ds_checkpoint",
    },
    "moe.sharded_moe": {"triax.moe has the router, the capacity and the dispatch of a mixture: docs/moe.md": "*"},
    "moe.layer": {"deepspeed.moe.layer.MoE makes its gate and its experts itself": "Experts TopKGate"},
    "monitor.config": {"triax writes to TensorBoard, CSV, JSON and Weights & Biases": "CometConfig"},
    "ops": {
        KERNELS: "transformer DeepSpeedTransformerLayer DeepSpeedTransformerConfig",
        FP8: "fp_quantizer",
        BUILDERS: "__compatible_ops__",
    },
    "ops.adam": {ZENFLOW: "ZenFlowCPUAdam ZenFlowSelectiveAdamW ZenFlowSelectiveAdamW_stage3"},
    "pipe": {DUALPIPE: "DualPipeVModule dualpipev"},
    "profiling.flops_profiler": {
        PROFILE: (
            "Tensor module_flop_count module_mac_count old_functions DEFAULT_PRECISION wrapFunc MODULE_HOOK_MAPPING "
            "macs_to_string number_to_string flops_to_string bytes_to_string params_to_string duration_to_string "
            "get_module_flops get_module_macs get_module_duration"
        )
    },
    "runtime.activation_checkpointing": {ACTIVATIONS: "offload_activations"},
    "runtime.fp16": {"the engine holds fp16's master weights and loss scale: engine.loss_scale()": "*"},
    "runtime.model_checkpointing": {WRITERS: "*"},
    "runtime.checkpoint_engine": {WRITERS: "*"},
    "runtime.swap_tensor": {NVME_TOOLS: "*"},
    "runtime.tensor_parallel": {AUTOTP: "*"},
    "runtime.torch_autocast": {AUTOCAST: "*"},
    "launcher.runner": {"triax run gives the ranks environment variables by --export NAME": "EXPORT_ENVS"},
    "runtime.utils": {INTERNAL: "*"},
    "utils.groups": {GROUPS: "*"},
    "utils": {
        COMM_LOG: "get_caller_func",
        GROUPS: (
            "mpu expert_tensor_parallel_world_size mesh_device initialize set_tensor_model_parallel_world_size "
            "set_tensor_model_parallel_rank"
        ),
        FRAGMENT: (
            "tensor_fragment get_full_hp_param get_hp_fragment_mapping fragment_address get_full_hp_grad "
            "map_to_flat_opt_states set_full_hp_param set_full_hp_grad link_hp_params "
            "lazy_init_hp_params_optimizer_state"
        ),
        "triax run binds no processes to cores: start triax run under numactl": "get_numactl_cmd",
    },
    "zero": {
        "to generate in stage 3, gather the weights: write 'with triax.zero.gathered(engine.module):'": (
            "unwrap_model_for_generation"
        ),
        INTERNAL: "DeepSpeedTensorOverride DeepSpeedZeRoOffload ZeroParamType",
    },
    "zero.stage3": {
        MEMORY: ("estimate_zero3_model_states_mem_needs_all_live estimate_zero3_model_states_mem_needs_all_cold")
    },
    "zero.stage_1_and_2": {
        MEMORY: ("estimate_zero2_model_states_mem_needs_all_live estimate_zero2_model_states_mem_needs_all_cold")
    },
    "zero.utils": {'write hasattr(parameter, "ds_id"): stage 3 sets this attribute': "is_zero_param"},
}

ABSENT_MODULES = {
    "autotuning": TUNER,
    "compile": COMPILE,
    "compression.compress": COMPRESSION,
    "datastates": WRITERS,
    "elasticity": ELASTIC,
    "inference.quantization": "init_inference(model, dtype=torch.int8, quant={...}) quantizes the weights",
    "inference.v2": FASTGEN,
    "io": NVME_TOOLS,
    "launcher": LAUNCHER,
    "linear": LORA,
    "model_implementations": KERNELS,
    "module_inject": INJECTION,
    "nvme": NVME_TOOLS,
    "ops.aio": BUILDERS,
    "ops.compile": BUILDERS,
    "ops.deepspeed4science": SCIENCE,
    "ops.fp_quantizer": FP8,
    "ops.gds": BUILDERS,
    "ops.op_builder": BUILDERS,
    "ops.pin_memory": PINNING,
    "ops.quantizer": FP8,
    "ops.random_ltd": RANDOM_LTD,
    "ops.sparse_attention": SPARSE,
    "ops.transformer": KERNELS,
    "ops.triton_ops": KERNELS,
    "pipe.schedule": SCHEDULE,
    "runtime.activation_checkpointing.offload_activations": ACTIVATIONS,
    "runtime.bf16_optimizer": MASTERS,
    "runtime.comm": 'the configuration\'s "gradient_compression" section compresses gradients: docs/compression.md',
    "runtime.data_pipeline": DATA,
    "runtime.domino": AUTOTP,
    "runtime.hybrid_engine": HYBRID,
    "runtime.rollout": ROLLOUT,
    "runtime.sequence_parallel": ULYSSES,
    "runtime.superoffload": SUPEROFFLOAD,
    "runtime.zenflow": ZENFLOW,
    "sequence": ULYSSES,
}


class Place(NamedTuple):
    """Place of a name in triax.

    Attributes:
        module: the module of triax, without ``triax.``, or of torch. ``=``: there is none.
        name: the name in it, or the value.
    """

    module: str
    name: str


def canonical(name: str) -> str:
    """Return the dotted name with DeepSpeed's second paths replaced by the first ones."""
    for second, first in ALIASES.items():
        if name == second or name.startswith(f"{second}."):
            return canonical(first + name.removeprefix(second))
    return name


@cache
def _answers() -> dict[str, Place | str]:
    found: dict[str, Place | str] = {}
    for module, places in PRESENT.items():
        for place, names in places.items():
            for name in names.split():
                theirs, _, ours = name.partition("=")
                default = theirs.lower() if place == "=" else theirs
                found[f"{module}.{theirs}".lstrip(".")] = Place(place, ours or default)
    for module, sentences in ABSENT.items():
        for sentence, names in sentences.items():
            found.update((f"{module}.{name}".lstrip("."), sentence) for name in names.split())
    return found


@cache
def _modules() -> set[str]:
    """The modules that triax has, with their packages, and the packages of those that it does not have."""
    paths = [module.split(".") for module in (*PRESENT, *ABSENT)]
    paths += [module.split(".")[:-1] for module in ABSENT_MODULES]
    return {".".join(path[:stop]) for path in paths for stop in range(1, len(path) + 1)} - {""}


def is_module(name: str) -> bool:
    """Return True if triax has a module of this name of DeepSpeed's."""
    return name in _modules()


def answer(name: str) -> Place | str | None:
    """Return the place of a name in triax, or the sentence that it raises. None: a module, or an unknown name.

    Args:
        name: dotted and canonical, without ``deepspeed.``.
    """
    found = _answers().get(name)
    if found is not None or is_module(name):
        return found
    module = name
    while module:
        if module in ABSENT_MODULES:
            return ABSENT_MODULES[module]
        module = module.rpartition(".")[0]
    return _answers().get(f"{name.rpartition('.')[0]}.*".lstrip("."))


def names(module: str) -> list[str]:
    """Return the names of a module that triax has, sub-modules too."""
    start = f"{module}." if module else ""
    found = [name for name, place in _answers().items() if isinstance(place, Place)]
    found += _modules()
    return [name.removeprefix(start) for name in found if name.startswith(start) and "." not in name[len(start) :]]


def markdown() -> str:
    """Return the ledger as a Markdown table: module of DeepSpeed, names, their place or the reason."""
    lines = ["| module | names | place in triax, or the reason |", "|---|---|---|"]
    for module in sorted({*PRESENT, *ABSENT, *ABSENT_MODULES}):
        shown = f"`deepspeed.{module}`".replace(".`", "`")
        places = PRESENT.get(module, {}).items()
        answers = [("the key's name" if place == "=" else f"`{home(place)}`", names) for place, names in places]
        answers += ABSENT.get(module, {}).items()
        answers += [(ABSENT_MODULES[module], "*")] if module in ABSENT_MODULES else []
        for answer, names in answers:
            listed = (
                "all others"
                if names == "*"
                else ", ".join(f"`{name.replace('=', '` is `')}`" for name in names.split())
            )
            listed = "all" if names == "*" and module not in PRESENT and len(answers) == 1 else listed
            lines.append(f"| {shown} | {listed} | {answer} |")
            shown = ""
    return "\n".join(lines)


def home(place: str) -> str:
    """Return the full name of a module of ``PRESENT``."""
    return place if place.startswith("torch") else f"triax.{place}".rstrip(".")
