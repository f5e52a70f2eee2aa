"""Outcomes of estimators, how entry points change them, and the maker of estimates.

*Error bars of derivatives.* The samples behind an estimate are linear in products with fixed
blocks. An outcome's `Evidence` holds these products. Their tangents are products with dA. One
function turns the products into the value's error bar, and their tangents into the
derivative's error bar.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Inexact, PyTree

from ._error_bar import ErrorBar, add_known_error, exact_bar
from ._estimate import Estimate
from ._results import RESULTS, finite_or_failed


class Evidence(eqx.Module):
    """Products, and a function of them, that determine the error bars of derivatives.

    - `products`: arrays linear in the operator, from its products with fixed blocks. We use
        only their tangents, which are products with dA.
    - `bars_from`: a fixed function; `bars_from(products)` returns an error bar for each value.
    - `solvers`: the relative error that iterative solvers inside the operator add to a
        derivative; `None` without such solvers.
    """

    products: PyTree[Any]
    bars_from: jtu.Partial
    solvers: Float[Array, ""] | None = None

    def times(self, factor: Inexact[Array, ""], errors: list[Array]) -> "Evidence":
        """The evidence for `factor` times an estimate with these standard errors."""
        bars_from = jtu.Partial(_scaled_bars, factor, errors, self.bars_from)
        return Evidence((self.products, factor), bars_from, self.solvers)

    def plus(self, known: "Evidence") -> "Evidence":
        """The evidence for a sum with a number that is known up to rounding."""
        bars_from = jtu.Partial(_bars_from_parts, self.bars_from, known.bars_from)
        return Evidence((self.products, known.products), bars_from, self.solvers)

    def slopes(self, values: list[Array], tangent: "Evidence") -> list[ErrorBar]:
        """Error bars for the derivatives `values`, from the evidence's `tangent`."""
        arrays = eqx.filter(self.products, eqx.is_inexact_array)

        def fill(t, x):
            return jnp.zeros_like(x) if t is None and x is not None else t

        tangents = tangent.products
        products = jtu.tree_map(fill, tangents, arrays, is_leaf=lambda x: x is None)
        errors, freedoms = [], []
        for x, (_, error, freedom) in zip(
            values, self.bars_from(products), strict=True
        ):
            errors.append(error.reshape(x.shape))
            freedoms.append(jnp.broadcast_to(freedom, error.shape).reshape(x.shape))
        if self.solvers is not None:
            solver = [jnp.where(x == 0, 0, self.solvers * jnp.abs(x)) for x in values]
            errors = list(map(jnp.hypot, errors, solver))
        return list(map(ErrorBar, values, errors, freedoms))


class Outcome(NamedTuple):
    """The output of an estimator.

    - `bars`: for a trace one error bar; for a diagonal or leaf traces one, with an axis; for
        a spectral function one for each leaf, and one for any quadratic forms. Unknown
        standard errors are infinite.
    - `results`: one for each leaf; quadratic forms share the first leaf's result.
    - `stats`: a dictionary with arrays.
    - `evidence`: for error bars of derivatives; `None` if they have none.
    - `kept`: buffers that a later estimate resumes from. With `()` no later estimate can
        resume. With `None` it computes everything again.
    """

    bars: list[ErrorBar]
    results: list[RESULTS]
    stats: dict[str, PyTree]
    evidence: Evidence | None = None
    kept: PyTree[Array] | None = None

    def times(self, factor: Inexact[Array, ""]) -> "Outcome":
        """The outcome for `factor` times the values."""
        evidence, bars = self.evidence, []
        if evidence is not None:
            errors = [bar.standard_error for bar in self.bars]
            evidence = evidence.times(factor, errors)
        for bar in self.bars:
            dtype = np.result_type(bar.mean.dtype, factor.dtype)
            error = jnp.abs(factor).astype(bar.standard_error.dtype)
            bars.append(
                bar._replace(
                    mean=bar.mean.astype(dtype) * factor.astype(dtype),
                    standard_error=error * bar.standard_error,
                )
            )
        return self._replace(bars=bars, evidence=evidence)

    def plus(self, known: ErrorBar, evidence: Evidence) -> "Outcome":
        """The outcome for the values plus a number that is known up to rounding.

        The sum is rounded, too, unless both parts are exact.
        """
        bars, own = [], self.evidence
        for bar in self.bars:
            dtype = np.result_type(bar.mean.dtype, known.mean.dtype)
            size = jnp.abs(bar.mean) + jnp.abs(known.mean)
            size = jnp.where(bar.standard_error + known.standard_error > 0, size, 0)
            rounding = exact_bar(known.mean, size).standard_error
            error = jnp.maximum(rounding, known.standard_error)
            mean = bar.mean.astype(dtype) + known.mean.astype(dtype)
            bars.append(add_known_error(bar._replace(mean=mean), error))
        both = None if own is None else own.plus(evidence)
        return self._replace(bars=bars, evidence=both)

    def with_stats(self, **stats: PyTree) -> "Outcome":
        return self._replace(stats={**self.stats, **stats})


def as_arrays(stats: dict[str, Any]) -> dict[str, PyTree[Array]]:
    def as_array(x):
        return jnp.asarray(x, jnp.int32) if isinstance(x, int) else jnp.asarray(x)

    return jtu.tree_map(as_array, stats)


def cast_bar(bar: ErrorBar, dtype: DTypeLike) -> ErrorBar:
    """Casts an error bar. A NaN error, or a mean that isn't finite, gives error inf."""
    mean, error, freedom = map(jnp.asarray, bar)
    if not jnp.issubdtype(dtype, jnp.complexfloating):
        mean = jnp.real(mean)
    mean = mean.astype(dtype)
    error = jnp.real(error).astype(jnp.finfo(dtype).dtype)
    known = jnp.isfinite(mean) & ~jnp.isnan(error)
    return ErrorBar(mean, jnp.where(known, error, jnp.inf), freedom)


def _scaled_bars(
    factor: Inexact[Array, ""],
    errors: list[Float[Array, "..."]],
    bars_from: jtu.Partial,
    products: tuple[PyTree, Inexact[Array, ""]],
) -> list[ErrorBar]:
    """Error bars for slopes of `factor` times values with these standard errors."""
    bars, change = [], jnp.abs(products[1])
    for bar, error in zip(bars_from(products[0]), errors, strict=True):
        # The factor's derivative adds a term, whose error may correlate: we add both.
        more = jnp.where(change == 0, 0, change.astype(error.dtype) * error)
        own = jnp.abs(factor).astype(error.dtype) * bar.standard_error
        bars.append(bar._replace(standard_error=own + more.reshape(own.shape)))
    return bars


def _bars_from_parts(
    bars_from: jtu.Partial, known: jtu.Partial, products: tuple[PyTree, PyTree]
) -> list[ErrorBar]:
    """Adds the error in a known part."""
    (part,) = known(products[1])
    bars = bars_from(products[0])
    return [add_known_error(bar, part.standard_error) for bar in bars]


# Makes the outcome of an entry point from an estimator's, and gives the state for it.
Change = Callable[[Outcome], tuple[Outcome, PyTree]]


def make_estimate(
    outcome: Outcome,
    treedef: Any,
    state: PyTree,
    by: tuple[str, int | float] = ("", math.inf),
) -> Estimate:
    """The estimate from an outcome, with values in the structure of `treedef`."""
    tree = treedef.unflatten
    bars = ErrorBar(*map(tree, zip(*outcome.bars, strict=True)))
    results = map(finite_or_failed, [x.mean for x in outcome.bars], outcome.results)
    stats = {**outcome.stats, "degrees_of_freedom": bars.degrees_of_freedom}
    result, evidence = tree(list(results)), outcome.evidence
    estimate = Estimate(*bars[:2], result, stats, state, by, evidence)
    if "bracket" not in stats:
        return estimate
    ends = tuple(_with_slopes(x, estimate.value) for x in stats["bracket"])
    return eqx.tree_at(lambda e: e.stats["bracket"], estimate, ends)


def _with_slopes(ends: PyTree[Array], value: PyTree[Array]) -> PyTree[Array]:
    """The ends of a bracket, with the value's derivative."""
    return jtu.tree_map(
        lambda end, x: jax.lax.stop_gradient(end) + (x - jax.lax.stop_gradient(x)),
        ends,
        value,
    )
