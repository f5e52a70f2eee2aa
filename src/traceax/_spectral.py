"""Traces of functions of an operator: log-determinants, inverses, norms, densities."""

import math
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
from jaxtyping import Array, ArrayLike, Float, Inexact, Key, Real

from ._estimate import RESULTS, Estimate, raise_failure
from ._estimators.krylov_aware import KrylovAwareEstimator
from ._known_diagonal import known_diagonal
from ._operator import (
    is_diagonal,
    is_positive_semidefinite,
    space_of,
)
from ._orthogonal import largest_entry, power_of_two_scale
from ._spectral_base import (
    SpectralEstimator,
    SpectralState,
    evaluation_result,
)
from ._spectral_function import spectral_function, tree_of
from ._state import check_budget, init_state


def trace_function(
    key: Key[Array, ""],
    fn: Callable[[Float[Array, ""]], Any],
    operator: lx.AbstractLinearOperator,
    k: int,
    estimator: SpectralEstimator | None = None,
    *,
    lower: ArrayLike | None = None,
    throw: bool = True,
) -> Estimate:
    r"""Estimates `tr f(A)`, the sum of `f` over the eigenvalues, from at most `k` products.

    ```python
    estimate = traceax.trace_function(key, jnp.sqrt, operator, 120)
    ```

    Differentiable with respect to `operator`, and to what `fn` closes over: first
    derivatives of any kind, and second derivatives with respect to the operator. They
    are estimates of the derivatives of `tr f(A)`, not derivatives of an algorithm.

    **Arguments:**

    - `key`: a single key, typed or legacy.
    - `fn`: a function of a real scalar, which JAX can differentiate. It may return a
        PyTree of scalars: all are estimated from the same products.
    - `operator`: a symmetric lineax operator (complex: Hermitian), over arrays or
        PyTrees. It need not be tagged so; its products must show it.
    - `k`: a positive Python int, the budget of products. For `k >= n` the answer is
        exact.
    - `estimator`: a [`traceax.SpectralEstimator`][]; by default
        [`traceax.KrylovAwareEstimator`][], but for operators known to be diagonal, of
        which the sum is exact.
    - `lower`: a real scalar that no eigenvalue is below, where one is known. With
        [`traceax.LanczosQuadratureEstimator`][] it makes the error bar a bound.
    - `throw`: whether a failure raises an error at run time, or is only reported in
        `result`.

    **Returns:**

    A [`traceax.Estimate`][], whose value is of the structure that `fn` returns. Its
    error bar holds the error of probes and that of the Krylov space.
    `stats["ritz_values"]` and `stats["ritz_weights"]` evaluate more functions without
    another product: `sum(ritz_weights * g(ritz_values))` estimates `tr g(A)`.

    **Raises:**

    - `TypeError` for a wrong key, function, operator, `k` or estimator, `ValueError`
        for an operator that isn't square, or a function that isn't one of scalars.
    - A run-time error for an operator that isn't Hermitian, a function that isn't
        finite on its spectrum, and whatever [`traceax.RESULTS`][] names.
    """
    where = "traceax.trace_function"
    return _estimate(where, key, fn, operator, k, estimator, throw, lower=lower)


def _estimate(where, key, fn, operator, k, estimator, throw, *, lower=None) -> Estimate:
    key = init_state(key, operator, where).key
    k = check_budget(k, where)
    if estimator is None:
        exact = _of_diagonal(where, key, fn, operator, k)
        if exact is not None:
            return raise_failure(exact) if throw else exact
        estimator = KrylovAwareEstimator()
    elif not isinstance(estimator, SpectralEstimator):
        raise TypeError(
            f"{where}: estimator must be a traceax.SpectralEstimator, got "
            f"{estimator!r}; pass an instance, such as "
            "traceax.KrylovAwareEstimator()."
        )
    state = estimator.init(key, operator, fn, lower=lower)
    return estimator.estimate(state, k, throw=throw)


def _of_diagonal(where, key, fn, operator, k) -> Estimate | None:
    """The sum over a diagonal, where structure gives it for at most k products."""
    diagonal = known_diagonal(operator) if is_diagonal(operator) else None
    if diagonal is None or diagonal.num_matvecs > k:
        return None
    space = space_of(operator)
    function = spectral_function(fn, space.real_dtype, where)
    entries = diagonal.read().astype(space.compute_dtype)
    values = jnp.real(entries)
    imaginary = jnp.max(jnp.abs(entries - values.astype(entries.dtype)), initial=0)
    rounding = 100 * jnp.sqrt(jnp.finfo(values.dtype).eps) * largest_entry(entries)
    result = RESULTS.where(
        imaginary > rounding, RESULTS.not_hermitian, RESULTS.successful
    )
    result = evaluation_result(result, function, values)
    failed = result != RESULTS.successful
    real = jnp.finfo(space.dtype).dtype

    def structured(leaves):
        return tree_of(function, space.real_dtype, leaves)

    totals = [jnp.sum(f) for f in function(values)]
    finite = jnp.isfinite(jnp.stack([jnp.abs(x) for x in totals])).all()
    result = RESULTS.where(failed | finite, result, RESULTS.nonfinite)
    kinds = [real if not jnp.iscomplexobj(x) else x.dtype for x in totals]
    stats = {
        "num_matvecs": jnp.asarray(diagonal.num_matvecs),
        "degrees_of_freedom": structured([jnp.asarray(jnp.inf) for _ in totals]),
        "ritz_values": values,
        "ritz_weights": jnp.ones_like(values),
    }
    return Estimate(
        structured([x.astype(kind) for x, kind in zip(totals, kinds, strict=True)]),
        structured([jnp.zeros((), real) for _ in totals]),
        result,
        stats,
        SpectralState(key, operator, function),
    )


def logdet(
    key: Key[Array, ""],
    operator: lx.AbstractLinearOperator,
    k: int,
    estimator: SpectralEstimator | None = None,
    *,
    shift: ArrayLike = 0.0,
    throw: bool = True,
) -> Estimate:
    r"""Estimates `log det(A + shift I)` from at most `k` products with A.

    The first job of a Gaussian process: `traceax.logdet(key, kernel, 100,
    shift=noise)`, differentiable with respect to the kernel and to the noise.

    A shift costs nothing and takes nothing of the accuracy: Krylov spaces of A and of
    `A + shift I` are the same, and eigenvalues that are all but `shift` drop out of
    the error. `shift=` and a lineax sum with a multiple of the identity are the same.

    **Arguments:** those of [`traceax.trace_function`][], and

    - `operator`: symmetric or Hermitian; `A + shift I` must be positive definite.
    - `shift`: a real scalar, may be traced and differentiated.

    **Returns:** a [`traceax.Estimate`][].
    """
    where = "traceax.logdet"
    operator, lower = _shifted(operator, shift, where)
    return _estimate(where, key, jnp.log, operator, k, estimator, throw, lower=lower)


def trace_inverse(
    key: Key[Array, ""],
    operator: lx.AbstractLinearOperator,
    k: int,
    estimator: SpectralEstimator | None = None,
    *,
    shift: ArrayLike = 0.0,
    throw: bool = True,
) -> Estimate:
    r"""Estimates `tr (A + shift I)^-1` from at most `k` products with A.

    For an operator that isn't Hermitian, or one that has a good solver, use
    `traceax.trace(key, traceax.InverseLinearOperator(operator, solver), k)`, whose k
    counts solves.

    **Arguments:** those of [`traceax.logdet`][].

    **Returns:** a [`traceax.Estimate`][].
    """
    where = "traceax.trace_inverse"
    operator, lower = _shifted(operator, shift, where)
    return _estimate(
        where, key, _reciprocal, operator, k, estimator, throw, lower=lower
    )


def schatten_norm(
    key: Key[Array, ""],
    operator: lx.AbstractLinearOperator,
    k: int,
    estimator: SpectralEstimator | None = None,
    *,
    p: ArrayLike = 1.0,
    throw: bool = True,
) -> Estimate:
    r"""Estimates `(sum_i |lambda_i|^p)^(1/p)` of a symmetric or Hermitian operator.

    `p=1` is the nuclear norm, `p=2` the Frobenius norm.

    **Arguments:** those of [`traceax.trace_function`][], and

    - `p`: a positive scalar, may be traced.

    **Returns:** a [`traceax.Estimate`][]; its error bar is that of the sum, through the
    derivative of the root.
    """
    where = "traceax.schatten_norm"
    if isinstance(p, int | float) and p <= 0:
        raise ValueError(f"{where}: p must be positive, got {p}.")
    space = space_of(init_state(key, operator, where).operator)
    power = jnp.asarray(p, space.real_dtype)
    # Powers of large or small eigenvalues leave the range of numbers.
    unit = _size_of_parameters(operator, space.real_dtype)
    scaled = operator * (1 / unit).astype(space.dtype)
    total = _estimate(where, key, _Power(power), scaled, k, estimator, throw)
    # The root of a sum, and the slope there for its error.
    positive = total.value > 0
    safe = jnp.where(positive, total.value, 1)
    exponent = (1 / power).astype(safe.dtype)
    value = jnp.where(positive, unit.astype(safe.dtype) * safe**exponent, 0)
    slope = jnp.where(positive, value / (safe / exponent), 1)
    error = total._standard_error
    error = jnp.where(error < 0, error, error * jax.lax.stop_gradient(slope))
    return eqx.tree_at(lambda e: (e.value, e._standard_error), total, (value, error))


def _size_of_parameters(operator: lx.AbstractLinearOperator, real) -> Float[Array, ""]:
    """A power of two next to the largest of the operator's parameters, or 1."""
    leaves = [x for x in jax.tree.leaves(operator) if eqx.is_inexact_array(x)]
    sizes = [largest_entry(x).astype(real) for x in leaves]
    if not sizes:
        return jnp.ones((), real)
    return jax.lax.stop_gradient(power_of_two_scale(jnp.stack(sizes)))


class _Power(eqx.Module):
    p: Float[Array, ""]

    def __call__(self, x):
        # The derivative of a power at 0 is not that of its two-argument form.
        magnitude = jnp.abs(x)
        positive = magnitude > 0
        safe = jnp.where(positive, magnitude, 1)
        return jnp.where(positive, safe ** self.p.astype(x.dtype), 0)


def von_neumann_entropy(
    key: Key[Array, ""],
    operator: lx.AbstractLinearOperator,
    k: int,
    estimator: SpectralEstimator | None = None,
    *,
    throw: bool = True,
) -> Estimate:
    r"""Estimates `-tr(A log A)` in nats, of a density matrix or a normalised Laplacian.

    `0 log 0 = 0`. The operator isn't normalised: divide it by its trace first.

    **Arguments:** those of [`traceax.trace_function`][]. The operator must be positive
    semidefinite.

    **Returns:** a [`traceax.Estimate`][].
    """
    where = "traceax.von_neumann_entropy"
    return _estimate(where, key, _entropy, operator, k, estimator, throw)


def estrada_index(
    key: Key[Array, ""],
    operator: lx.AbstractLinearOperator,
    k: int,
    estimator: SpectralEstimator | None = None,
    *,
    throw: bool = True,
) -> Estimate:
    r"""Estimates `tr exp(A)`, of the adjacency matrix of a graph.

    **Arguments:** those of [`traceax.trace_function`][].

    **Returns:** a [`traceax.Estimate`][].

    **Reference:** Estrada, "Characterization of 3D molecular structure", Chem. Phys.
    Lett. 319 (2000), doi:10.1016/S0009-2614(00)00158-5.
    """
    where = "traceax.estrada_index"
    return _estimate(where, key, jnp.exp, operator, k, estimator, throw)


class SpectralDensity(eqx.Module):
    """An estimated distribution of eigenvalues: weights at points, n in all.

    **Attributes:**

    - `points`: real, where the weights are.
    - `weights`: how many eigenvalues each stands for. Leaving probes out can make
        single ones slightly negative; sums of many are not.
    """

    points: Float[Array, " p"]
    weights: Float[Array, " p"]

    def integrate(self, fn: Callable[[Array], Array]) -> Inexact[Array, ""]:
        """The sum of a function over the eigenvalues, of arrays elementwise."""
        return jnp.sum(self.weights * fn(self.points))

    def count(self, upper: Real[Array, "..."]) -> Float[Array, "..."]:
        """How many eigenvalues are at most `upper`."""

        def of(bound):
            return jnp.sum(jnp.where(self.points <= bound, self.weights, 0))

        return jnp.vectorize(of)(jnp.asarray(upper))

    def density(self, at: Real[Array, "..."], width: ArrayLike) -> Float[Array, "..."]:
        """Eigenvalues per unit, every point spread to a normal density of `width`."""

        def of(point):
            z = (point.astype(self.points.dtype) - self.points) / width
            return jnp.sum(self.weights * jnp.exp(-(z**2) / 2))

        return jnp.vectorize(of)(jnp.asarray(at)) / (width * math.sqrt(2 * math.pi))


def spectral_density(
    key: Key[Array, ""],
    operator: lx.AbstractLinearOperator,
    k: int,
    estimator: SpectralEstimator | None = None,
    *,
    throw: bool = True,
) -> SpectralDensity:
    """Estimates the distribution of eigenvalues of a symmetric or Hermitian operator.

    **Arguments:** those of [`traceax.trace_function`][].

    **Returns:** a [`traceax.SpectralDensity`][]. Not differentiable.
    """
    where = "traceax.spectral_density"
    estimate = _estimate(where, key, _identity, operator, k, estimator, throw)
    points, weights = jax.lax.stop_gradient(
        (estimate.stats["ritz_values"], estimate.stats["ritz_weights"])
    )
    return SpectralDensity(points, weights)


def _reciprocal(x):
    return 1 / x


def _entropy(x):
    return jax.scipy.special.entr(x)


def _identity(x):
    return x


def _shifted(
    operator: lx.AbstractLinearOperator, shift: ArrayLike, where: str
) -> tuple[lx.AbstractLinearOperator, Float[Array, ""] | None]:
    """`A + shift I`, and what no eigenvalue of it is below, if A is semidefinite."""
    if not isinstance(operator, lx.AbstractLinearOperator):
        return operator, None  # refused later
    if isinstance(shift, int | float) and shift == 0:
        return operator, None
    if jnp.shape(shift) != () or jnp.iscomplexobj(shift):
        raise ValueError(
            f"{where}: shift must be a real scalar, got one of shape "
            f"{jnp.shape(shift)} and dtype {jnp.result_type(shift)}."
        )
    dtype = space_of(operator).dtype
    scalar = jnp.asarray(shift).astype(jnp.finfo(dtype).dtype)
    identity = lx.IdentityLinearOperator(operator.in_structure())
    total = operator + identity * scalar.astype(dtype)
    if not is_positive_semidefinite(operator):
        return total, None
    if isinstance(shift, int | float) and shift > 0:
        total = lx.TaggedLinearOperator(total, lx.positive_semidefinite_tag)
    return total, jax.lax.stop_gradient(scalar)
