r"""Error bars of derivatives of spectral functions.

Of `tr f(A)` the derivative along dA is `tr(C M)`, with the matrix

    M = F o (V^* dA V) + diag(df(theta))

in Ritz vectors V, F of divided differences, and that of sample i is `tr(C_i M)`: the samples
that leave a probe out are those of any matrix on the Krylov space. What the space leaves of
the derivative has no bounds: it is made of the last step's change, and of what that step left
of `tr f(A)`.
"""

import operator as op
from typing import Any, NamedTuple

import equinox as eqx
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jaxtyping import Array, Float, Inexact, Int

from .._accuracy.error_bar import leave_one_out_bar
from .._linalg.krylov import Projected, RitzPairs, ritz_pairs
from .._linalg.left_out_krylov import (
    LeftOut,
    coupling_of_fewer,
    paired_samples,
    sample_forms,
)
from .._linalg.small import cholesky, divisor, matmul, squares
from .._linalg.tall import column_dots, inner
from .control import ColumnControl
from .function import SpectralFunction, divided_differences, weighted_sums


class Tests(NamedTuple):
    """What the error bar of a derivative takes of a Krylov space.

    - `left_out`: the spaces without probes, of `shallow` steps.
    - `steps`: of the whole space.
    - `columns`: what controls samples; `None` for nothing.
    - `unfound`: what the space leaves of every leaf, and of quadratic forms.
    """

    left_out: LeftOut
    projected: Projected
    steps: int | Int[Array, ""]
    shallow: int | Int[Array, ""]
    columns: ColumnControl | None
    unfound: tuple[list[Float[Array, ""]], Float[Array, " q"] | None]

    def padded(self, missing: int) -> "Tests":
        """In a space of so many dimensions more, of which nothing is taken."""
        width = self.projected.omega.shape[1]
        fewer = missing // width * (width - 1)
        left_out, (T, omega, asymmetry) = self.left_out, self.projected
        none, more = (0, 0), (0, missing)
        tests = jnp.pad(left_out.tests, (none, none, more))
        spaces = jnp.pad(left_out.spaces, (none, none, (0, fewer), more))
        omega = jnp.pad(omega, (more, none))
        return self._replace(
            left_out=LeftOut(spaces, tests, left_out.dimensions),
            projected=Projected(jnp.pad(T, (0, missing)), omega, asymmetry),
        )


def slope_errors(
    tests: Tests,
    pairs: RitzPairs,
    solutions: Inexact[Array, "p q"] | None,
    state: Any,
    tangent: Any,
    products: Inexact[Array, "n p"] | None,
) -> tuple[list[Float[Array, ""]], list[Float[Array, ""]], Float[Array, " q"] | None]:
    """Standard errors and degrees of freedom of every leaf's derivative, and the errors of
    those of quadratic forms, from products of dA with the basis."""
    T, omega, _ = tests.projected
    n, width, rows = len(pairs.basis), omega.shape[1], tests.left_out.tests.shape[2]
    D = jnp.zeros_like(T) if products is None else inner(pairs.basis, products)
    D = (D + D.conj().T) / 2
    earlier, shallow = tests.steps - 1, tests.shallow - 1
    theta, S = ritz_pairs(T, width * jnp.maximum(earlier, 1))
    # Rounding must not take a node out of the function's domain.
    theta = jnp.clip(theta, jnp.min(pairs.values), jnp.max(pairs.values))
    before, after = (theta, S), (pairs.values, pairs.vectors)
    function = state.function.in_range(pairs.values)
    # Tested by the spaces without a probe of a step less, which lie in both.
    C = coupling_of_fewer(tests.left_out, omega[:rows], n, shallow)

    def sums(theta, S):
        """`tr(C f(T))` and `tr(C M)` of every leaf, and its M."""
        coupling = inner(S[:rows], matmul(C, S[:rows]))
        weights = jnp.real(jnp.diagonal(coupling))
        Ms = _matrices(theta, S, D, function, tangent.function)
        values = [weighted_sums(weights, f) for f in function(theta)]
        return (values, [jnp.sum(coupling.T.astype(M.dtype) * M) for M in Ms]), Ms

    (sums_before, _), (sums_after, Ms) = sums(*before), sums(*after)
    change = jtu.tree_map(lambda x, y: jnp.abs(x - y), sums_before, sums_after)
    changes = zip(*change, strict=True)
    S, (of_leaves, of_forms) = pairs.vectors, tests.unfound
    is_known = jnp.asarray(earlier > 0) & jnp.asarray(shallow > 0)
    errors, freedoms = [], []
    for M, unfound, change in zip(Ms, of_leaves, changes, strict=True):
        B = matmul(S[:rows], matmul(M, S[:rows].conj().T))
        samples, tested = sample_forms(tests.left_out, B)
        if tests.columns is not None:
            samples = samples + tests.columns.of(tested)
        size = jnp.sum(jnp.abs(jnp.diagonal(B)))
        bar = leave_one_out_bar(paired_samples(samples, size))
        left = jnp.where(is_known, _unfound(unfound, *change), jnp.inf)
        errors.append(jnp.hypot(bar.standard_error, left))
        freedoms.append(bar.degrees_of_freedom)
    if solutions is None or of_forms is None:
        return errors, freedoms, None
    t_right = tangent.right
    if t_right is not None:
        t_right = inner(pairs.basis, t_right)
    u = matmul(S, solutions)
    of_forms = _errors_of_forms(of_forms, tests, u, D, t_right)
    return errors, freedoms, jnp.where(jnp.asarray(earlier > 0), of_forms, jnp.inf)


def _unfound(
    of_value: Float[Array, "*s"],
    change: Float[Array, "*s"],
    change_of_slope: Float[Array, "*s"],
) -> Float[Array, "*s"]:
    """What the space leaves of a derivative, by what it leaves of the function.

    That is the fraction f of what the last step changed. Derivatives have one factor more to
    converge, and `of_value` is half of a bracket, of which f(T) is at an end: of their change
    3 f is taken, at most all; or f, at most 1.5, where the function has not converged. Of
    two kernels and a chain of spins, what was left by the exact derivative was 0.2 to 1.7
    times as much, but for rounding.
    """
    f = of_value / divisor(change)
    return change_of_slope * jnp.clip(f, jnp.minimum(3 * f, 1), 1.5)


def _matrices(
    theta: Float[Array, " k"],
    S: Inexact[Array, "k k"],
    D: Inexact[Array, "k k"],
    function: SpectralFunction,
    t_function: SpectralFunction,
) -> list[Inexact[Array, "k k"]]:
    """The matrix M of every leaf."""
    inside = inner(S, matmul(D, S))
    changes = [None for _ in function(theta)]
    if jtu.tree_leaves(t_function):
        _, changes = eqx.filter_jvp(lambda fn: fn(theta), (function,), (t_function,))
    found = []
    for F, change in zip(
        divided_differences(function, theta, theta), changes, strict=True
    ):
        dtype = np.result_type(F.dtype, S.dtype)
        M = F.astype(dtype) * inside.astype(dtype)
        if change is not None:
            M = M + jnp.diag(change.astype(dtype))
        found.append(M)
    return found


def _errors_of_forms(
    of_value: Float[Array, " q"],
    tests: Tests,
    u: Inexact[Array, "k q"],
    D: Inexact[Array, "k k"],
    t_right: Inexact[Array, "k q"] | None,
) -> Float[Array, " q"]:
    r"""Errors of `2 u^* db - u^* dA u`, with `u = A^-1 b` of the Krylov space.

    With the error e of u it is `2 <e, A^-1 db>` for the first term, in the inner product of A.
    With a Cholesky factor `T = R R^*` the blocks of

        y = R^* u = R^-1 b ,    z = R^-1 db

    are what steps found of u and of `A^-1 db`, orthogonal to each other: the term is
    `2 sum_j y_j^* z_j`, and `|e|^2` the sum of `|y_j|^2` over the steps to come, which a bracket
    tells: `of_value` is its half, and the more is left, over the more steps it spreads. For
    `|z_j|` stands the last one, for the cosine of both its root mean square, as `y_j^* z_j` may
    be 0 by accident. What db has of b itself has the error of `b^* u`.

    The second term is judged by its last change, of which what is left is as much as the root
    mean square of e over what the last step found of u; at most all.
    """
    T, omega, _ = tests.projected
    k, width = omega.shape
    step, last = jnp.arange(k) // width, tests.steps - 1
    taken, unit = step <= last, jnp.eye(k, dtype=T.dtype)
    R, inverse = cholesky(jnp.where(taken[:, None] & taken[None], T, unit))

    def of_steps(x):
        return jnp.sum(x.reshape(k // width, width, -1), axis=1)

    y = inner(R, u)
    found = of_steps(squares(y))
    before = u - inner(inverse, jnp.where((step == last)[:, None], y, 0))
    forms = (jnp.real(column_dots(x, matmul(D, x))) for x in (u, before))
    part = jnp.minimum(of_value / divisor(found[last]), 1)
    error = jnp.abs(op.sub(*forms)) * jnp.sqrt(part)
    if t_right is None:
        return error
    z = matmul(inverse, t_right)
    along = jnp.sum(y.conj() * z, axis=0) / divisor(jnp.sum(squares(y), axis=0))
    z = z - along[None] * y
    of_right = of_steps(squares(z))
    cosines = of_steps(jnp.real(y.conj() * z)) ** 2 / divisor(found * of_right)
    cosine = jnp.sum(cosines, axis=0) / jnp.asarray(tests.steps).astype(y.real.dtype)
    left = 2 * of_value * (1 + 2 * part)
    error = error + 2 * jnp.abs(along) * of_value
    return error + 2 * jnp.sqrt(left * of_right[last] * cosine)
