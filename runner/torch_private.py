"""Undocumented parts of torch that samewise needs.

Each is looked up at its first use, and `show` imports none. An operator's name may begin with `_`
as well (`torch.ops.aten._ctc_loss`).
"""

from pkgutil import resolve_name
from typing import Any, Final

_KERNELS = "to update many tensors by few kernels"
_LAYERS = "to recognise layers"
_COMPILER = "to compile a model for the training step"
_AOTI = "to export a model as an AOTInductor package"
_EXPORT = "to export a model"
_PORTABLE = "for reproducibility=portable"

NEEDED: Final[dict[str, tuple[str, str]]] = {
    # torch's own optimizers use these. The public operators take one tensor each.
    "foreach_add": ("torch:_foreach_add", _KERNELS),
    "foreach_add_": ("torch:_foreach_add_", _KERNELS),
    "foreach_copy_": ("torch:_foreach_copy_", _KERNELS),
    "foreach_mul_": ("torch:_foreach_mul_", _KERNELS),
    "foreach_norm": ("torch:_foreach_norm", _KERNELS),
    "foreach_zero_": ("torch:_foreach_zero_", _KERNELS),
    # `Optimizer.step` has a range for the profiler, which takes longer than a small update; whether
    # it can be left out, only these say.
    "global_optimizer_post_hooks": (
        "torch.optim.optimizer:_global_optimizer_post_hooks",
        "to call an optimizer's step",
    ),
    "global_optimizer_pre_hooks": (
        "torch.optim.optimizer:_global_optimizer_pre_hooks",
        "to call an optimizer's step",
    ),
    "profiler_enabled": ("torch.autograd:_profiler_enabled", "to call an optimizer's step"),
    # The public classes are subclasses, one for each number of dimensions, and a user may write
    # another.
    "BatchNorm": ("torch.nn.modules.batchnorm:_BatchNorm", _LAYERS),
    "ConvNd": ("torch.nn.modules.conv:_ConvNd", _LAYERS),
    "NormBase": ("torch.nn.modules.batchnorm:_NormBase", _LAYERS),
    # torch.distributed.checkpoint pickles it into the metadata of its files.
    "StorageInfo": (
        "torch.distributed.checkpoint.filesystem:_StorageInfo",
        "to read checkpoints of strategy=fsdp",
    ),
    # torch's manual extends torch by this class, under this name; TorchFunctionMode is above
    # `float(tensor)`.
    "TorchDispatchMode": ("torch.utils._python_dispatch:TorchDispatchMode", "for strategy=fsdp"),
    "local_scalar_dense": ("torch:ops.aten._local_scalar_dense.default", "for strategy=fsdp"),
    # Registers the backend `fake`, which has no other door.
    "FakeStore": (
        "torch.testing._internal.distributed.fake_pg:FakeStore",
        "to profile simulated processes",
    ),
    # TORCH_FR_DUMP_TEMP_FILE writes a file when NCCL's watchdog ends the process; only this reads
    # the recorder before.
    "dump_fr_trace_json": (
        "torch._C._distributed_c10d:_dump_fr_trace_json",
        "to name the collective in which a process hangs",
    ),
    # torch.backends.nnpack sets it, and does not tell it.
    "get_nnpack_enabled": (
        "torch._C:_get_nnpack_enabled",
        "to notice that a module has changed torch's settings",
    ),
    # torch's manual documents both under these names.
    "dump_memory_snapshot": ("torch.cuda.memory:_dump_snapshot", "to profile memory"),
    "record_memory_history": ("torch.cuda.memory:_record_memory_history", "to profile memory"),
    # The agent starts ranks by the name `Popen` in this module; a fork need not import anything.
    "subprocess_handler": (
        "torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler",
        "to start ranks",
    ),
    "is_in_bad_fork": ("torch.cuda:_is_in_bad_fork", "to start ranks"),
    # A DataLoader's workers that have ended on purpose count as killed until torch forgets them.
    "remove_worker_pids": (
        "torch.utils.data._utils.signal_handling:_remove_worker_pids",
        "to end a loader's workers",
    ),
    # What torch.export takes apart inputs by; torch.utils.pytree does not exist.
    "pytree": ("torch.utils._pytree", _EXPORT),
    "OpOverload": ("torch._ops:OpOverload", _EXPORT),
    "check": ("torch:_check", "to tell an export what sizes are equal"),
    # torch.compile takes a class of the partitioner in its options, but where that class is, and
    # what it calls, is private.
    "CustomPartitionerFn": ("torch._inductor.custom_graph_pass:CustomPartitionerFn", _COMPILER),
    "min_cut_rematerialization_partition": (
        "torch._functorch.partitioners:min_cut_rematerialization_partition",
        _COMPILER,
    ),
    # torch.compiler.config is the same by aliases, which take 30 microseconds longer in every
    # forward pass.
    "dynamo_config": ("torch._dynamo.config", _COMPILER),
    # torch.compile raises these; torch.compiler has no name for them.
    "FailOnRecompileLimitHit": ("torch._dynamo.exc:FailOnRecompileLimitHit", _COMPILER),
    "TorchDynamoException": ("torch._dynamo.exc:TorchDynamoException", _COMPILER),
    "InductorError": ("torch._inductor.exc:InductorError", _COMPILER),
    "InvalidCxxCompiler": ("torch._inductor.exc:InvalidCxxCompiler", _COMPILER),
    # Inductor's precompiled headers go to /tmp, whatever TORCHINDUCTOR_CACHE_DIR says: samewise
    # changes the three names below.
    "inductor_codecache": ("torch._inductor.codecache", _COMPILER),
    "inductor_header_dir": ("torch._inductor.codecache:_HEADER_DIR", _COMPILER),
    "inductor_header_lock_dir": ("torch._inductor.codecache:_HEADER_LOCK_DIR", _COMPILER),
    "inductor_runtime_utils": ("torch._inductor.runtime.runtime_utils", _COMPILER),
    "inductor_default_cache_dir": (
        "torch._inductor.runtime.runtime_utils:default_cache_dir",
        _COMPILER,
    ),
    "inductor_cache_dir": ("torch._inductor.runtime.runtime_utils:cache_dir", _COMPILER),
    "inductor_lowering": ("torch._inductor.lowering", _COMPILER),
    # What decides the bits of compiled code on a CPU.
    "get_cpp_compiler": ("torch._inductor.cpp_builder:get_cpp_compiler", _COMPILER),
    "pick_vec_isa": ("torch._inductor.cpu_vec_isa:pick_vec_isa", _COMPILER),
    # torch's manual documents the first two under these names.
    "aoti_compile_and_package": ("torch._inductor:aoti_compile_and_package", _AOTI),
    "aoti_load_package": ("torch._inductor:aoti_load_package", _AOTI),
    "inductor_config": ("torch._inductor.config", _AOTI),
    # Operators of which torch.nn.functional has another form: without the gradient, by MKL, or
    # vectorised.
    "attention_for_cpu": (
        "torch:ops.aten._scaled_dot_product_flash_attention_for_cpu",
        "to count the operations of attention",
    ),
    "ctc_loss": ("torch:ops.aten._ctc_loss.Tensor", "for the CTC loss"),
    "ctc_loss_backward": ("torch:ops.aten._ctc_loss_backward.Tensor", "for the CTC loss"),
    "grid_sampler_2d_cpu_fallback": ("torch:ops.aten._grid_sampler_2d_cpu_fallback", _PORTABLE),
    "linear_pointwise": ("torch:ops.mkldnn._linear_pointwise", _PORTABLE),
}
"""By samewise's name: where it is in torch, and what samewise needs it for."""


def __getattr__(name: str) -> Any:
    if name not in NEEDED:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    place, purpose = NEEDED[name]
    try:
        part = globals()[name] = resolve_name(place)
    except (ImportError, AttributeError):
        import torch

        message = (
            f"torch {torch.__version__} no longer has {place.replace(':', '.')}, which "
            f"samewise needs {purpose}"
        )
        raise ImportError(message) from None
    return part
