"""One thread for NumPy's BLAS: the products of a decode step are so small that a second thread only makes them wait.

Wheels of NumPy carry an OpenBLAS of their own, whose thread count can be set in the running process. A NumPy over
another BLAS keeps its own count; results do not depend on it.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np

_SET_THREADS = "scipy_openblas_set_num_threads64_"


def use_one_thread() -> bool:
    """Limit the bundled OpenBLAS to one thread, for the whole process; False where there is none."""
    root = Path(np.__file__).parent
    folders = (root.parent / "numpy.libs", root / ".dylibs")
    for library in (path for folder in folders for path in folder.glob("libscipy_openblas*")):
        set_threads = getattr(ctypes.CDLL(str(library)), _SET_THREADS, None)
        if set_threads is not None:
            set_threads(1)
            return True
    return False
