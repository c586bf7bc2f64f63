"""The thread limit of NumPy's own OpenBLAS."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np

from dsuf.model.reference.blas import use_one_thread


def test_the_bundled_blas_is_left_with_one_thread():
    libraries = list((Path(np.__file__).parent.parent / "numpy.libs").glob("libscipy_openblas*"))
    assert use_one_thread() == bool(libraries)
    for library in libraries:
        assert ctypes.CDLL(str(library)).scipy_openblas_get_num_threads64_() == 1
