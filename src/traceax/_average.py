"""Means over few probes, for budgets that are too small to find a basis."""

import math

from ._accuracy.error_bar import ErrorBar, gram_of, independent_samples
from ._linalg.tall import column_dots, column_norms
from ._operators.block import apply_block
from ._samplers import Sampler
from ._slope import with_bar
from ._state import TraceState


def average(state: TraceState, k: int, sampler: Sampler, *, resphere: bool):
    """The mean over k probes, as `compute` returns it."""
    n = state.space.size
    W = sampler.sample(state.key, n, k, state.space.compute_dtype)
    if resphere:
        W = W * (math.sqrt(n) / column_norms(W)).astype(W.dtype)[None, :]
    bar = _bar(W, apply_block(state.operator, W))
    stats = {"num_matvecs": k, "degrees_of_freedom": bar.degrees_of_freedom}
    return bar.mean, bar.standard_error, stats, with_bar((W, W / k), _bar)


def _bar(W, AW) -> ErrorBar:
    samples = column_dots(W, AW)
    # Subtracting a multiple of the identity leaves the part that causes skewness.
    mean = samples.mean() / len(W)
    gram = gram_of(W, AW) - mean * gram_of(W, W)
    return independent_samples(samples, column_norms(AW), gram, may_miss=True)
