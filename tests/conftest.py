"""Run the suite under JAX's strict modes, in 64-bit mode by default.

`JAX_ENABLE_X64=0 pytest` runs it in 32-bit mode, as most users run JAX.
"""

import gc
import math
import os
import pathlib

# With more than one thread per LAPACK call, OpenBLAS and XLA spin against each other.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import jax
import jaxtyping
import pytest

jax.config.update("jax_enable_x64", os.environ.get("JAX_ENABLE_X64", "1") != "0")
# We drop source lines from compiled programs, where they cost a tenth of the time.
# Errors show them anyway.
jax.config.update("jax_traceback_in_locations_limit", 0)
# We cache compiled programs in the checkout, so that a second run reuses them.
if not jax.config.jax_compilation_cache_dir:  # pyright: ignore
    folder = pathlib.Path(__file__).parents[1] / ".pytest_cache" / "programs"
    jax.config.update("jax_compilation_cache_dir", str(folder))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
# A program consists of many small objects, few of them garbage, so we collect rarely.
gc.set_threshold(50_000, 50, 1_000)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


# We start the slowest files first.
FIRST = (
    "sharding",
    "docs",
    "tolerance",
    "spectral",
    "statistics",
    "transforms",
    "testing",
)
# Prefixes of the quick tests in each file; "" selects the whole file. They compare
# every formula with a loop and every estimator with the truth, and cover the derivative
# rule, failures and README's code. We mark all other tests as slow.
QUICK = {
    "adaptive": "test_formulas_against_loops[10",
    "architecture": "",
    "bracket": "",
    "bracket_bars": "test_the_estimator_against_a_naive_bracket[exp-True",
    "check_operator": "test_faults",
    "chunks": "test_wrong test_chunks_agree_with_one_block[complex",
    "coloured_traces": "test_the_trace",
    "colours": "test_nodes test_refusals test_unbiased",
    "convert": "test_products test_tags test_wrong test_objects_that_are_refused",
    "curvature": "",
    "depth": "test_a_loose",
    "diagonal": "test_entries_and_derivatives_are_unbiased[XTrace test_wrong",
    "divergence": "test_unbiased_with_gradients[4 test_wrong",
    "docs": "test_links test_versions test_blocks test_figures test_code_of_other",
    "edges": "test_low_rank_is_exact[xtrace test_small_budgets_are_unbiased[xtrace",
    "errors": "",
    "exact": "test_log_determinants_inverses_and_forms_of_matrices[False "
    "test_triangular test_indefinite test_inverses",
    "failure": "test_nonfinite_values_are_reported[xtrace-NaN test_derivatives",
    "flat_functions": "test_an_isolated",
    "fresh_functions": "test_functions_read",
    "inverse_diagonal": "test_remainder[few",
    "inverse_operator": "test_tags test_wrong test_products",
    "kernel_operator": "test_every_number test_bad test_rows",
    "krylov": "",
    "leave_one_out": "test_xtrace test_nystrom test_the_bar",
    "likelihood": "test_likelihood_with_derivatives test_bad test_other_bad "
    "test_complex_obs",
    "linalg": "",
    "matrix_function": "test_products test_wrong",
    "mean_operator": "test_one_pass test_wrong test_batches",
    "operator_catalogue": "test_operations[complex test_operations[function "
    "test_operations[Gauss test_operations[kernel test_operations[mean "
    "test_operations[prec test_operations[inverse",
    "operators": "test_every_class test_complex_gradient",
    "own_preconditioner": "test_wrong",
    "pivots": "test_residuals test_arguments",
    "preconditioner": "test_factors_and_derivatives[10]",
    "primitive": "test_derivatives_under_vmap[3] test_the_same",
    "printing": "test_a_line test_sizes test_forecasts test_exact test_inside",
    "problems": "",
    "progress": "test_any test_every test_wrong test_missing",
    "registered_entries": "test_wrong",
    "release": "",
    "resume": "test_resuming_equals_one_run[xnystrace-plain]",
    "right_answers": "test_tags_on_expressions test_complex_multiples_are",
    "samplers": "test_isotropic test_samplers",
    "slopes": "test_slopes_of_traces_have_bars[xtrace] test_a_bias_of_two_percent",
    "spectral": "test_enough test_every_budget[kry test_failures_are test_diagonals "
    "test_wrong test_wrappers test_operators_that",
    "spectral_statistics": "test_derivatives_are_exact test_intervals_cover[exp",
    "spectral_tolerance": "test_wrong",
    "statistics": "test_unbiased test_the_standard_error_is_the_root_mean_square_error[x",
    "testing": "test_only test_checks_find_their_faults[bias- "
    "test_checks_find_their_faults[gradient",
    "tolerance": "test_wrong "
    "test_intervals_contain_the_truth_despite_repeated_looks[xtrace]",
    "trace": "test_known_structure test_student",
    "transforms": "test_the_derivative_pairs_the_frozen_blocks[xny "
    "test_the_derivative_pairs_the_frozen_blocks[hutch "
    "test_vmap_agrees_with_single_calls[xny",
}
# In 32-bit mode, we run the tests that depend on precision.
QUICK_IN_32_BITS = {
    "bracket": "test_the_bracket",
    "docs": "test_pages_show test_code_runs[README",
    "edges": "test_scale_equivariance",
    "krylov": "test_block_lanczos test_divided test_lanczos",
    "likelihood": "test_likelihood_with_derivatives",
    "linalg": "",
    "statistics": "test_unbiased[xtrace test_unbiased[xny",
}


def _is_quick(item):
    table = QUICK if jax.config.jax_enable_x64 else QUICK_IN_32_BITS  # pyright: ignore
    prefixes = table.get(item.path.stem.removeprefix("test_"))
    if prefixes is None:
        return False
    return item.name.startswith(tuple(prefixes.split()) or "")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: item.path.stem.removeprefix("test_") not in FIRST)
    for item in items:
        if not _is_quick(item):
            item.add_marker("slow")
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
    """Clear JAX's caches after a file that leaves many memory maps.

    Every program that XLA compiles for the CPU holds memory maps, and Linux allows a
    process 65,530. Two processes that run the whole suite would cross this limit and be
    killed. Below 20,000 maps we keep the programs: several files share the small ones.
    """
    yield
    if _number_of_memory_maps() > 20_000:
        jax.clear_caches()


@pytest.fixture(autouse=True)
def _leave_wrong_types_to_the_library(request):
    """Let our own error messages through: `--jaxtyping-packages` would raise first."""
    before = jaxtyping.config.jaxtyping_disable
    if request.node.get_closest_marker("wrong_types"):
        jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", before)


@pytest.fixture
def key():
    return jax.random.key(20)
