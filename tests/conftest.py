"""Strict modes for the whole suite, in the 64-bit mode that `JAX_ENABLE_X64` asks for.

64-bit by default; `JAX_ENABLE_X64=0 pytest` runs it as most users have jax.
"""

import gc
import math
import os
import pathlib

# One thread a LAPACK call: with more, OpenBLAS and XLA spin against each other.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import jax
import jaxtyping
import pytest

jax.config.update("jax_enable_x64", os.environ.get("JAX_ENABLE_X64", "1") != "0")
# Lines of sources in compiled programs take a tenth of the time. Errors show them still.
jax.config.update("jax_traceback_in_locations_limit", 0)
# A second run takes its programs from a folder of the checkout.
if not jax.config.jax_compilation_cache_dir:  # pyright: ignore
    folder = pathlib.Path(__file__).parents[1] / ".pytest_cache" / "programs"
    jax.config.update("jax_compilation_cache_dir", str(folder))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
# Programs are many small objects, of which few are garbage.
gc.set_threshold(50_000, 50, 1_000)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


# The files that take longest, which begin first.
SLOW = (
    "sharding",
    "docs",
    "tolerance",
    "spectral",
    "statistics",
    "transforms",
    "testing",
)


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: item.path.stem.removeprefix("test_") not in SLOW)
    if not jax.config.jax_enable_x64:  # pyright: ignore
        skip = pytest.mark.skip(reason="needs 64-bit mode")
        for item in items:
            if "x64" in item.keywords:
                item.add_marker(skip)


def _number_of_memory_maps():
    try:
        with open("/proc/self/maps") as maps:
            return sum(1 for _ in maps)
    except OSError:
        return math.inf


@pytest.fixture(autouse=True, scope="module")
def _forget_compiled_programs():
    """Each program XLA compiles for the CPU holds memory maps, of which Linux allows a
    process 65,530: a whole suite in two processes would cross that and be killed. Small
    programs are of use to several files."""
    yield
    if _number_of_memory_maps() > 20_000:
        jax.clear_caches()


@pytest.fixture(autouse=True)
def _leave_wrong_types_to_the_library(request):
    """With `--jaxtyping-packages`, calls are checked before our own messages come."""
    before = jaxtyping.config.jaxtyping_disable
    if request.node.get_closest_marker("wrong_types"):
        jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", before)


@pytest.fixture
def key():
    return jax.random.key(20)
