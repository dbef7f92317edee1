"""Programs compiled for GPUs that this machine doesn't have, by the compiler that would compile them there.

`jobs` is the caller's side, `worker` the process that loads the CUDA plugin of jax; `kernels` and `programs` name what
there is to compile: every Pallas kernel at its real shapes, and whole decode steps at real sizes.
"""

from atlas_jax.lab.crosscompile.chips import CHIPS, Chip
from atlas_jax.lab.crosscompile.jobs import CrossCompileError, Job, Wheels, compile_jobs
from atlas_jax.lab.crosscompile.reports import Kernel, Report

__all__ = ["CHIPS", "Chip", "CrossCompileError", "Job", "Kernel", "Report", "Wheels", "compile_jobs"]
