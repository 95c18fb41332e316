"""The options with which XLA compiles `jax.lax`'s own collectives here: those its guides advise.

They go with the program, not with the process: our kernels are compiled without them.
"""

# Collectives that other work may overlap. XLA's guide to flags (openxla.org/xla/flags_guidance)
# gives those for all-gathers on v5e; the compiler refuses them for other generations.
_TPU = {
    "xla_enable_async_all_reduce": True,
    "xla_enable_async_collective_permute": True,
    "xla_tpu_enable_async_all_to_all": True,
}
_V5E = {
    "xla_enable_async_all_gather": True,
    "xla_tpu_enable_async_collective_fusion": True,
    "xla_tpu_enable_async_collective_fusion_fuse_all_gather": True,
}
# NVIDIA's JAX-Toolbox sets this one in its images. Kernels with NVLink multicast stay off.
_GPU = {"xla_gpu_enable_latency_hiding_scheduler": True}


def options(platform: str, chip: str = "") -> dict[str, bool]:
    """Compiler options by name.

    Args:
      platform: "tpu" or "gpu"; other platforms have no options.
      chip: the device kind.
    """
    is_v5e = chip.startswith(("TPU v5 lite", "TPU v5e"))
    return {"tpu": _TPU | _V5E if is_v5e else _TPU, "gpu": _GPU}.get(platform, {})


def named(options: dict[str, bool]) -> str:
    """The options in a line, as a table's footnote."""
    return ", ".join(f"{name}={str(value).lower()}" for name, value in options.items())
