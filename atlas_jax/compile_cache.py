"""JAX's persistent compilation cache: a script that is started again compiles nothing that it has compiled before."""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path

import jax

FOLDER = Path(__file__).resolve().parents[1] / ".cache" / "jax"  # of a checkout; the tests keep theirs there too
LEAST_S = 0.1  # programs that compile faster are not worth a file


@dataclasses.dataclass(frozen=True)
class CompileCache:
    """Where compiled programs are kept and what is there; `folder` is None where nothing can be kept, for `reason`."""

    folder: Path | None
    programs: int = 0
    bytes: int = 0
    reason: str = ""

    def describe(self) -> str:
        """One line to print once per run."""
        if self.folder is None:
            return f"compiled programs are not kept: {self.reason}"
        return f"compiled programs are kept in {self.folder}: {self.programs} of them, {self.bytes / 1e6:,.1f} MB"


def keep_compiled(folder: Path | None = None) -> CompileCache:
    """Keep compiled programs in `folder`, and take up those that are there; call it before anything is compiled.

    Without a folder: where JAX has been told already (`JAX_COMPILATION_CACHE_DIR`), else `FOLDER`. A program is found
    again under the same jax, XLA options, devices and shapes. Counts of compilations (`decode.compiles`) are not
    fooled: a program that is taken up counts as compiled. The folder only grows; it may be removed at any time.
    """
    told = jax.config.jax_compilation_cache_dir
    folder = (folder or Path(told or FOLDER)).expanduser().absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):  # of its own: other processes start at the same moment
            pass
    except OSError as error:
        return CompileCache(None, reason=str(error))
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", LEAST_S)
    kept = [file.stat().st_size for file in folder.glob("*-cache")]
    return CompileCache(folder, len(kept), sum(kept))
