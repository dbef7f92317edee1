"""GPUs to compile for, as XLA's target descriptions name their limits."""

from __future__ import annotations

import dataclasses

from atlas_jax.kernels.backends import Target


@dataclasses.dataclass(frozen=True)
class Chip:
    """One GPU. Sizes in bytes, from the maker's data sheets; `kind` is a name that jax knows.

    Attributes:
      capability: CUDA's compute capability.
      cores: streaming multiprocessors.
      shared_block, shared_core: most shared memory of a block (opted in) and of a multiprocessor.
      bandwidth: of memory, bytes per second.
    """

    kind: str
    capability: tuple[int, int]
    cores: int
    shared_block: int
    shared_core: int
    l2: int
    bandwidth: int
    memory: int

    @property
    def name(self) -> str:
        return f"sm_{self.capability[0]}{self.capability[1]}"

    def target(self) -> Target:
        """What a choice of kernels depends on, were this the device of this process."""
        return dataclasses.replace(Target.current(), platform="gpu", kind=self.kind, capability=self.capability)

    def target_config(self) -> str:
        """XLA's `GpuTargetConfigProto` in text form."""
        # A real sm_9x or later has its accelerated instructions; a description has to say so from sm_100 on.
        accelerated = "feature_extension: ACCELERATED_FEATURES" if self.capability >= (10, 0) else ""
        return f"""
            gpu_device_info {{
              threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048 fpus_per_core: 128
              block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
              registers_per_core_limit: 65536 registers_per_block_limit: 65536 shared_memory_per_block: 49152
              shared_memory_per_block_optin: {self.shared_block} shared_memory_per_core: {self.shared_core}
              core_count: {self.cores} l2_cache_size: {self.l2} clock_rate_ghz: 1.98
              memory_bandwidth: {self.bandwidth} device_memory_size: {self.memory}
              cuda_compute_capability {{ major: {self.capability[0]} minor: {self.capability[1]} {accelerated} }}
            }}
            platform_name: "CUDA" device_description_str: "{self.kind}"
            dnn_version_info {{ major: 9 minor: 10 }} runtime_version {{ major: 12 minor: 9 patch: 0 }}
        """


_LIST = (
    Chip("NVIDIA A100", (8, 0), 108, 166912, 167936, 40 << 20, 2_039_000_000_000, 80 << 30),
    Chip("NVIDIA H200", (9, 0), 132, 232448, 233472, 50 << 20, 4_800_000_000_000, 141 << 30),
    Chip("NVIDIA RTX PRO 6000", (12, 0), 188, 101376, 102400, 128 << 20, 1_792_000_000_000, 96 << 30),
    Chip("NVIDIA GB10", (12, 1), 48, 101376, 102400, 24 << 20, 273_000_000_000, 128 << 30),
)
CHIPS: dict[str, Chip] = {chip.name: chip for chip in _LIST}
