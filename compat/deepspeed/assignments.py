"""Assignments to members of DeepSpeed's engines, on an object or on its class: they act, or raise an error.

Scripts replace methods of DeepSpeed's engine classes and set attributes that DeepSpeed's engines read. What triax's
engines do not call or read would have no effect, without a word. A name that DeepSpeed's engines do not have is the
script's own.
"""

from __future__ import annotations

import inspect
from functools import partialmethod
from typing import Any

from .ledger import INTERNAL, SCHEDULE

_VALUES = "the configuration and the state of the run set it"
# What to do instead -> members of DeepSpeed 0.19's engines that triax's do not call or read.
_INSTEAD = {
    SCHEDULE: (
        "_INSTRUCTION_MAP _exec_backward_pass _exec_forward_pass _exec_instr _exec_load_micro_batch "
        "_exec_optimizer_step _exec_recv_activations _exec_recv_grads _exec_reduce_grads _exec_reduce_tied_grads "
        "_exec_schedule _exec_send_activations _exec_send_grads"
    ),
    "pass the optimizer, or a function that makes it, to initialize: optimizer=": (
        "_configure_optimizer _configure_basic_optimizer _configure_bf16_optimizer _configure_fp16_optimizer "
        "_configure_zero_optimizer _take_model_step basic_optimizer client_optimizer"
    ),
    "assign engine.lr_scheduler, or pass lr_scheduler= to initialize": (
        "_configure_lr_scheduler _scheduler_from_config client_lr_scheduler"
    ),
    'set "gradient_clipping" in the configuration': "clip_fp32_gradients gradient_clipping",
    "call engine.set_gradient_accumulation_boundary(...)": (
        "is_gradient_accumulation_boundary _is_gradient_accumulation_boundary _force_grad_boundary gas_boundary_ctr"
    ),
    "call engine.set_train_batch_size or engine.set_train_micro_batch_size": (
        "train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps micro_batch_size"
    ),
    "run backward passes whose gradients are not reduced in engine.no_sync()": (
        "enable_backward_allreduce pipeline_enable_backward_allreduce allreduce_gradients buffered_allreduce_fallback "
        "allreduce_bucket allreduce_and_copy allreduce_no_retain inside_no_sync_ctxt"
    ),
    "pass loss_fn= to PipelineModule": "loss_model _compute_loss",
    "engine.save_checkpoint(..., exclude_frozen_parameters=True) leaves out what is not trained": (
        "module_state_dict checkpoint_engine save_non_zero_checkpoint save_zero_checkpoint _save_checkpoint "
        "_load_checkpoint _save_zero_checkpoint _load_zero_checkpoint _save_moe_checkpoint"
    ),
    'set "steps_per_print" and the monitors in the configuration': (
        "_report_progress _write_monitor monitor tput_log steps_per_print"
    ),
    "call engine.set_dataloader, engine.set_dataiterator or engine.set_batch_fn": (
        "data_iterator batch_fn _next_batch _build_data_iter"
    ),
    _VALUES: (
        "bfloat16_enabled dynamic_loss_scale fp16_enabled get_data_types loss_scale postscale_gradients "
        "wall_clock_breakdown zero_cpu_offload zero_use_cpu_optimizer zero_optimization zero_optimization_stage "
        "zero_optimization_partition_gradients zero_optimization_partition_weights sparse_tensor_module_names "
        "_running_engine_backward _running_engine_step _step_applied _global_grad_norm _is_compiled _config"
    ),
    INTERNAL: (
        "DTYPE_TO_ID ID_TO_DTYPE _aggregate_total_loss _allocate_buffer _allocate_or_extend_buffers _allocate_zeros "
        "_apply_autotp_partitioning _assert_valid_mixed_precision_config _autoep_expert_parameter_names "
        "_autoep_folding_group_handles _autoep_folding_spec _autoep_non_expert_param_families _autoep_param_family "
        "_autoep_sequence_parallel_world_size _autoep_zero_optimizer_param_families _autotuning_exit "
        "_backward_epilogue _backward_post_hook _backward_prologue _backward_prologue_per_tensor _bcast_pipe_scalar "
        "_bf16_reduce_grads _broadcast_model _cast_inputs_half _cast_module_mixed_precision "
        "_change_recovery_script_permissions _check_for_duplicates _checkpoint_tag_validation "
        "_commit_decoupled_checkpoint _common_checkpoint_state _compile_kwargs "
        "_configure_autoep_folding_optimizer_gradient_reduction _configure_checkpointing "
        "_configure_compression_scheduler _configure_curriculum_scheduler_legacy _configure_distributed_model "
        "_configure_eigenvalue _configure_expert_parallel _configure_progressive_layer_drop _configure_quantization "
        "_configure_random_ltd_scheduler _configure_tensor_parallel _configure_tensor_parallel_states "
        "_configure_with_arguments _configure_zenflow _consolidated_16bit_state_dict _copy_recovery_script "
        "_create_checkpoint_file _create_module_forward_post_hook _create_module_forward_pre_hook "
        "_create_zero_checkpoint_files _curr_ckpt_path _deepcompile_active _do_args_sanity_check "
        "_do_optimizer_sanity_check _do_sanity_check _flush_coalesced_reduction_zero12 "
        "_flush_coalesced_reduction_zero3 _forward_epilogue _forward_prologue _get_all_ckpt_names "
        "_get_all_zero_checkpoint_names _get_all_zero_checkpoint_state_dicts _get_all_zero_checkpoints "
        "_get_buffer_names _get_ckpt_name _get_expert_ckpt_name _get_gradients_for_reduction _get_model_parameters "
        "_get_mp_rank_zero_checkpoint_names _get_non_moe_state_dict _get_optimizer_ckpt_name _get_optimizer_loss_scale "
        "_get_optimizer_param _get_param_fragment_func _get_param_shape_func _get_rank_zero_ckpt_name "
        "_get_shared_params _get_zero_ckpt_name _get_zero_ckpt_prefix _get_zero_frozen_param_attributes "
        "_get_zero_param_shapes _grad_layer_buf _has_autoep_layers _is_compiled_autograd_enabled "
        "_is_same_process_group _is_supported_optimizer _is_zenflow_update_boundary _make_autoep_folding_metadata "
        "_manual_backward_expected _mixed_precision_dtypes _optimized_linear_offload_setup "
        "_optimizer_has_ckpt_event_epilogue _optimizer_has_ckpt_event_prologue "
        "_raise_if_autoep_zero3_consolidated_export _recv_tensor_meta _reduce_autoep_folding_tp_replicated_gradients "
        "_reduce_expert_gradients _reduce_non_expert_gradients _reduce_outputs _reentrant_activation_checkpointing "
        "_refine_include_states _release_deepcompile_compiled_backward_state _release_deepcompile_dynamo_config "
        "_replace_module_consolidated_state_dict _reserve_pipe_buffers _resolve_zero3_param_placement "
        "_return_mics_optimizer _scale_loss_by_gas _scale_wrt_gas _send_tensor_meta _set_client_model "
        "_set_deepcompile_active _set_distributed_vars _start_timers _stop_timers _supported_optims "
        "_sync_zenflow_optimizer_lr _unmanaged_backward_count _update_wall_clock_timers "
        "_uses_autoep_zero3_partitioned_experts _validate_autoep_folding_checkpoint_metadata "
        "_validate_autoep_zero3_partitioned_metadata _validate_zero3_moe_compatibility _zenflow_step "
        "_zero3_consolidated_16bit_state_dict agg_additional_losses aio_config all_gather_scalar all_to_all_group "
        "amp_params autotp_size autotuning_enabled autotuning_end_profile_step autotuning_metric "
        "autotuning_metric_path autotuning_model_info autotuning_model_info_path autotuning_profile_model_info "
        "autotuning_start_profile_step batch_timer bf16_master_weights_and_gradients bf16_optimizer_states "
        "block_eigenvalue checkpoint_mp_rank checkpoint_serialization_enabled checkpoint_tag_validation_enabled "
        "checkpoint_tag_validation_fail checkpoint_writer_enabled compile_autosp compile_autotp "
        "compile_zero_optimization_stage compression_scheduler cpuadam_cores_perc curriculum_enabled_legacy "
        "curriculum_learning_config curriculum_learning_enabled curriculum_params_legacy curriculum_scheduler_legacy "
        "data_efficiency_config data_efficiency_enabled data_sampling_config data_sampling_enabled dist_backend "
        "dp_group_loss dynamic_loss_scale_args eigenvalue eigenvalue_enabled eigenvalue_gas_boundary_resolution "
        "eigenvalue_layer_name eigenvalue_layer_num eigenvalue_max_iter eigenvalue_stability eigenvalue_tol "
        "eigenvalue_verbose elasticity_enabled engine_timers engine_timers_cache eval_return_logits "
        "expert_data_parallel_group expert_parallel_group first_dataloader_check flatten flops_profiler "
        "flops_profiler_detailed flops_profiler_module_depth flops_profiler_output_file flops_profiler_profile_step "
        "flops_profiler_recompute_fwd_factor flops_profiler_top_modules fp16_master_weights_and_gradients fwd_duration "
        "gate_modules get_additional_losses get_autosp_backend get_autotp_backend get_compile_time "
        "get_deepcompile_backend get_deepspeed_compile_backend get_pld_theta get_wall_clock_timers "
        "grad_partition_grad_layer_meta_cache gradient_average graph_harvesting has_bool_tensors has_moe_layers "
        "initial_dynamic_scale is_deepcompile_active is_deepcompile_enabled is_elastic_model_parallel_supported "
        "is_first_weights_partition_group is_grad_partitioned is_iterable_style_dataset is_map_style_dataset "
        "is_pipe_partitioned is_sanity_checks_enabled load_moe_state_dict load_universal_checkpoint "
        "loaded_checkpoint_dp_world_size loaded_checkpoint_mp_world_size local_all_to_all_group log_for_device "
        "mesh_device mics_shard_size module_forward_post_hook module_forward_pre_hook moe_layers num_experts "
        "num_pipe_buffers optimized_linear_base_weight_sharding optimized_linear_lora_enabled optimizer_legacy_fusion "
        "param_names pipe_buffers pipe_partition_grad_meta_cache pipe_partition_input_meta_cache "
        "pipe_partition_output_meta_cache pipeline_parallelism pld_enabled pld_gamma pld_params pld_theta "
        "print_forward_breakdown progressive_layer_drop quantize_training quantizer random_ltd_config "
        "random_ltd_enabled random_ltd_initialize random_ltd_scheduler register_compile_pass scale_wrt_gas "
        "seq_dp_world_size sequence_parallel_size set_custom_curriculum_learning_schedule set_data_post_process_func "
        "set_has_attention_mask sparse_all_gather sparse_allreduce sparse_allreduce_bucket sparse_allreduce_no_retain "
        "super_offload swap_tensor_config tensor_parallel_config torch_autocast_dtype "
        "torch_autocast_lower_precision_safe_modules torch_autocast_z0_gradscaler total_additional_losses unflatten "
        "update_interval use_node_local_storage uses_parallelization_pass_only using_bf16_optimizer zenflow_config "
        "zero_allow_untested_optimizer zero_force_ds_cpu_optimizer zero_grad_hooks zero_multi_rank_bucket_allreduce "
        "zero_nvme_offload_optimizer zero_partial_offload zeropp_loco_param"
    ),
}
_LINES = {name: line for line, names in _INSTEAD.items() for name in names.split()}


class EngineType(type):
    """Class of DeepSpeed's engine classes, whose members scripts assign."""

    def __setattr__(cls, name: str, value: Any) -> None:
        _check(cls, name)
        super().__setattr__(name, value)

    def __getattr__(cls, name: str) -> Any:
        raise AttributeError(f"{cls.__name__} has no {name}{reason(name)}")


def reason(name: str) -> str:
    """Return why an engine has no member of DeepSpeed's, as the end of a sentence; nothing for other names."""
    return f", which DeepSpeed's engine has: {_LINES[name]}" if name in _LINES else ""


def check_assignment(engine: Any, name: str, value: Any) -> None:
    """Check an assignment to a member of an engine.

    Raises:
        AttributeError: it would have no effect. The message says what to do instead.
    """
    if name in ("enable_backward_allreduce", "pipeline_enable_backward_allreduce") and value is True:
        return  # as it is
    if name == "optimizer" and vars(engine).get(name) not in (None, value):
        raise AttributeError(
            "engine.optimizer was assigned another optimizer, which would have no effect, because the engine's own "
            "optimizer steps this rank's shards: pass the optimizer, or a function that makes it, to "
            "initialize(optimizer=...)"
        )
    _check(type(engine), name)


def _check(cls: type, name: str) -> None:
    found = inspect.getattr_static(cls, name, None)
    computed = isinstance(found, partialmethod) or (isinstance(found, property) and found.fset is None)
    line = _LINES.get(name, _VALUES if computed else None)
    if line is not None:
        raise AttributeError(
            f"{cls.__name__}.{name} was assigned, which would have no effect, because triax's engine does not call or "
            f"read it: {line}"
        )
