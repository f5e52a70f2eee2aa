"""Means over few probes, for budgets that are too small to find a basis."""

import math
from typing import Any

import jax.numpy as jnp
import jax.tree_util as jtu
from jaxtyping import Array, Inexact

from ._accuracy.error_bar import GRAM_PROBES, ErrorBar, gram_of, independent_samples
from ._estimator import TraceState
from ._linalg.tall import column_dots, column_norms
from ._operators.block import apply_block
from ._rule import Blocks, Evidence
from ._samplers import Sampler


def average(state: TraceState, k: int, sampler: Sampler, *, resphere: bool) -> Any:
    """The mean over k probes, as `compute` returns it."""
    n = state.space.size
    W = sampler.sample(state.key, n, k, state.space.compute_dtype)
    if resphere:
        W = W * (math.sqrt(n) / column_norms(W)).astype(W.dtype)[None, :]
    AW = apply_block(state.operator, W)
    samples, first = column_dots(W, AW), AW.T[:GRAM_PROBES]
    (bar,) = _judge(W, (samples, first))
    stats = {"num_matvecs": k, "degrees_of_freedom": bar.degrees_of_freedom}
    nothing = jnp.zeros_like(samples), jnp.zeros_like(first)
    evidence = Evidence(nothing, jtu.Partial(_judge, W))
    return bar.mean, bar.standard_error, stats, Blocks([(W, W / k)], evidence)


def _judge(
    W: Inexact[Array, "n k"],
    products: tuple[Inexact[Array, " k"], Inexact[Array, "few n"]],
) -> list[ErrorBar]:
    samples, first = products
    # Subtracting a multiple of the identity leaves the part that causes skewness.
    mean = samples.mean() / len(W)
    gram = gram_of(W, first.T) - mean * gram_of(W, W)
    norms = column_norms(first.T)
    return [independent_samples(samples, norms, gram, may_miss=True)]
