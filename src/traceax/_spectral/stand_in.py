r"""The derivative of `tr f(A)`, and of quadratic forms with the inverse, and its error bar.

With a basis K of a Krylov space, Ritz values theta, their vectors S in the basis, and a
Hermitian matrix C such that `E[K S C S^* K^*] = I`, the estimate `tr(C f(Theta))` of
`tr f(A)` has the derivative `tr(C M)` with

    M = F o (S^* D S) + diag(df(theta)),    D = K^* dA K,
    F_ij = (f(theta_i) - f(theta_j)) / (theta_i - theta_j),

K, S and C held fixed (Daleckii and Krein; Higham, "Functions of Matrices" (2008), theorem
3.11, doi:10.1137/1.9780898717778). With `u = A^-1 b`, in coordinates of the basis, the
derivative of `b^* A^-1 b` is `2 Re(u^* K^* db) - u^* D u`. So products with dA enter by the
small matrix D alone.

*Error bars.* Sample i has the derivative `tr(C_i M)`: the samples that leave a probe out are
those of any matrix on the Krylov space. The truncation error of a derivative has no bounds.
We take it from the change that the last step made, and from the truncation error of
`tr f(A)` then.
"""

import operator as op
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import lineax as lx
import numpy as np
from jaxtyping import Array, Float, Inexact, Int, PyTree

from .._error_bar import ErrorBar, leave_one_out_bar
from .._linalg.dense import (
    cholesky,
    column_dots,
    divisor,
    frobenius,
    inner,
    matmul,
    squares,
)
from .._linalg.krylov import ritz_pairs
from .._linalg.left_out_krylov import (
    coupling_of_fewer,
    leave_probes_out,
    paired_samples,
    sample_forms,
)
from .._linalg.types import if_any
from .._operators.space import product_tangent
from .._rule import Derivative, Evidence, StandIn
from .bounds import ColumnControl
from .function import SpectralFunction, divided_differences, final, weighted_sums

# Columns that are multiplied at once where their number is known at run time only.
_CHUNK = 64


class RitzStandIn(StandIn):
    r"""Ritz pairs, and the matrix C that makes them a stand-in for the identity.

    - `basis`: K.
    - `theta`, `S`: Ritz values, and their vectors in the basis.
    - `coupling`: C.
    - `count`: how many of the pairs there are, where that is known at run time only.
        Values beyond are copies of one of them, everything else is 0 there.
    - `solutions`: coordinates in the Ritz vectors of `A^-1 B` for the right-hand sides B of
        the state; `None` without such.
    - `evidence`: for error bars of derivatives; `None` if they have none.
    """

    basis: Inexact[Array, "n p"]
    theta: Float[Array, " p"]
    S: Inexact[Array, "p p"]
    coupling: Inexact[Array, "p p"]
    count: Int[Array, ""] | None = None
    solutions: Inexact[Array, "p q"] | None = None
    evidence: Evidence | None = None

    def derivative(self, state, tangent):
        if not jtu.tree_leaves((tangent.operator, tangent.function, tangent.rhs)):
            return None
        D = _projected_tangent(state.operator, tangent.operator, self.basis, self.count)
        t_rhs = tangent.rhs
        t_rhs = None if t_rhs is None else inner(self.basis, t_rhs)
        parts = self.theta, self.S, self.coupling, self.solutions
        # Second derivatives would need the tangents of these.
        theta, S, C, solutions = final(parts, of=(state.operator, state.function))
        function = state.function.in_range(theta)
        values: list[Array | None] = [
            _trace_of_product(C, M, f)
            for M, f in zip(
                slope_matrices(theta, S, D, function, tangent.function),
                function(theta),
                strict=True,
            )
        ]
        if solutions is not None:
            u = matmul(S, solutions)
            forms = jnp.zeros_like(theta, shape=u.shape[1])
            if D is not None:
                forms = forms - jnp.real(column_dots(u, matmul(D, u)))
            if t_rhs is not None:
                forms = forms + 2 * jnp.real(column_dots(u, t_rhs))
            values.append(forms)
        return Derivative(values, (D, tangent.function, t_rhs))


def _trace_of_product(C: Array, M: Array, f: Array) -> Array:
    total = jnp.sum(C.T.astype(M.dtype) * M)
    return total if jnp.iscomplexobj(f) else jnp.real(total)


def _projected_tangent(
    operator: lx.AbstractLinearOperator,
    t_operator: PyTree,
    basis: Inexact[Array, "n p"],
    count: Int[Array, ""] | None,
) -> Inexact[Array, "p p"] | None:
    """`K^* dA K` for the first `count` columns of K, the others being 0."""
    n, p = basis.shape
    if not jtu.tree_leaves(t_operator):
        return None
    if count is None or p <= _CHUNK:
        products = product_tangent(operator, t_operator, basis)
        return None if products is None else inner(basis, products)
    number = -(-p // _CHUNK)
    rows = jnp.pad(basis.T, ((0, number * _CHUNK - p), (0, 0)))
    chunks = rows.reshape(number, _CHUNK, n)

    # Within the condition, too: it would keep zeros of all that a chunk it skips had made.
    @jax.checkpoint
    def project(chunk):
        products = product_tangent(operator, t_operator, chunk.T)
        return None if products is None else inner(basis, products)

    shape = jax.eval_shape(project, chunks[0])
    if shape is None:
        return None

    @jax.checkpoint
    def part(of):
        start, chunk = of
        return if_any(start < count, project, shape, chunk)

    starts = _CHUNK * jnp.arange(number, dtype=jnp.int32)
    found = jax.lax.map(part, (starts, chunks))
    return jnp.moveaxis(found, 0, 1).reshape(p, -1)[:, :p]


def slope_matrices(
    theta: Float[Array, " k"],
    S: Inexact[Array, "k k"],
    D: Inexact[Array, "k k"] | None,
    function: SpectralFunction,
    t_function: PyTree,
) -> list[Inexact[Array, "k k"]]:
    """The matrix M for every leaf."""
    changes: list[Array | None] = [None for _ in function(theta)]
    if jtu.tree_leaves(t_function):
        _, changes = eqx.filter_jvp(lambda fn: fn(theta), (function,), (t_function,))
    inside = jnp.zeros_like(S) if D is None else inner(S, matmul(D, S))
    found = []
    for F, change in zip(
        divided_differences(function, theta, theta), changes, strict=True
    ):
        dtype = np.result_type(F.dtype, S.dtype)
        M = F.astype(dtype) * inside.astype(dtype)
        # A leaf may not depend on what others close over.
        if change is not None:
            M = M + jnp.diag(change.astype(dtype))
        found.append(M)
    return found


#
# Error bars
#


class Exact(NamedTuple):
    """All eigenvalues, for the error bar of the derivative of an exact answer."""

    theta: Float[Array, " n"]
    S: Inexact[Array, "n n"]
    solutions: Inexact[Array, "n q"] | None


def judge_exact(
    exact: Exact, function: SpectralFunction, products: tuple[Any, Any, Any]
) -> list[ErrorBar]:
    """The errors that rounding makes of exact slopes, `tr(f'(A) dA)` and those of forms.

    Eigenvalues that are off by eps |A| change f'(A), and entries of dA may cancel.
    """
    (theta, S, coordinates), (D, t_function, t_rhs) = exact, products
    eps, size = jnp.finfo(theta.dtype).eps, jnp.max(jnp.abs(theta))
    dA = frobenius(D)
    function = function.in_range(theta)
    # f', of which an infinite one is replaced.
    exactly, moved = (
        [jnp.diagonal(F) for F in divided_differences(function, x, x)]
        for x in (theta, theta + eps * size)
    )
    infinite = jnp.full((), jnp.inf, theta.dtype)
    bars = []
    for x, y, M in zip(
        exactly, moved, slope_matrices(theta, S, D, function, t_function), strict=True
    ):
        bound = dA * (jnp.linalg.norm(y - x) + eps * jnp.linalg.norm(x))
        value = jnp.trace(M)
        error = bound + len(theta) * eps * jnp.abs(value)
        bars.append(ErrorBar(value, error, infinite))
    if coordinates is not None:
        u = matmul(S, coordinates)
        forms = 2 * jnp.real(column_dots(u, t_rhs)) - jnp.real(
            column_dots(u, matmul(D, u))
        )
        condition = size / jnp.maximum(jnp.min(theta), eps * size)
        bound = 2 * eps * condition * dA * jnp.sum(squares(coordinates), axis=0)
        error = bound + len(theta) * eps * jnp.abs(forms)
        bars.append(ErrorBar(forms, error, infinite))
    return bars


class Truncated(NamedTuple):
    """A Krylov space and what is known of its truncation error.

    - `omega`: coordinates of the starting vectors in the basis.
    - `theta`, `S`: Ritz values and vectors.
    - `n`, `q`: how many unknowns, and right-hand sides among the starting vectors.
    - `steps`, `shallow`: steps of the space, and of the spaces without a probe.
    - `most_left_out`: the number of steps that those have room for.
    - `columns`: control variates by columns, or `None`.
    - `solutions`: coordinates of solutions in the Ritz vectors, or `None`.
    - `leaf_errors`, `form_errors`: truncation errors.
    """

    omega: Inexact[Array, "k w"]
    theta: Float[Array, " k"]
    S: Inexact[Array, "k k"]
    n: int
    q: int
    steps: int | Int[Array, ""]
    shallow: int | Int[Array, ""]
    most_left_out: int
    columns: ColumnControl | None
    solutions: Inexact[Array, "k q"] | None
    leaf_errors: list[Float[Array, ""]]
    form_errors: Float[Array, " q"] | None

    @property
    def T(self) -> Inexact[Array, "k k"]:
        return matmul(
            self.S * self.theta[None, :].astype(self.S.dtype), self.S.conj().T
        )


def judge_truncated(
    space: Truncated, function: SpectralFunction, products: tuple[Any, Any, Any]
) -> list[ErrorBar]:
    """Error bars of the derivatives of every leaf, and of quadratic forms."""
    T, omega, (D, t_function, t_rhs) = space.T, space.omega, products
    width, n = omega.shape[1], space.n
    rows = width * space.most_left_out
    left_out = leave_probes_out(
        T[:rows, :rows], omega[:rows], n, space.shallow, space.q
    )
    D = (D + D.conj().T) / 2
    earlier, shallow = space.steps - 1, space.shallow - 1
    theta, S = ritz_pairs(T, width * jnp.maximum(earlier, 1))
    # Rounding must not take a node out of the function's domain.
    theta = jnp.clip(theta, jnp.min(space.theta), jnp.max(space.theta))
    before, after = (theta, S), (space.theta, space.S)
    function = function.in_range(space.theta)
    # Tested by the spaces without a probe of a step less, which lie in both.
    C = coupling_of_fewer(left_out, omega[:rows], n, shallow)

    def sums(theta, S):
        """`tr(C f(T))` and `tr(C M)` of every leaf, and its M."""
        coupling = inner(S[:rows], matmul(C, S[:rows]))
        weights = jnp.real(jnp.diagonal(coupling))
        Ms = slope_matrices(theta, S, D, function, t_function)
        values = [weighted_sums(weights, f) for f in function(theta)]
        return (values, [jnp.sum(coupling.T.astype(M.dtype) * M) for M in Ms]), Ms

    (sums_before, _), (sums_after, Ms) = sums(*before), sums(*after)
    change = jtu.tree_map(lambda x, y: jnp.abs(x - y), sums_before, sums_after)
    changes = zip(*change, strict=True)
    S = space.S
    is_known = jnp.asarray(earlier > 0) & jnp.asarray(shallow > 0)
    bars = []
    for M, unfound, change in zip(Ms, space.leaf_errors, changes, strict=True):
        B = matmul(S[:rows], matmul(M, S[:rows].conj().T))
        samples, tested = sample_forms(left_out, B)
        if space.columns is not None:
            samples = samples + space.columns.of(tested)
        size = jnp.sum(jnp.abs(jnp.diagonal(B)))
        bar = leave_one_out_bar(paired_samples(samples, size))
        remaining = jnp.where(is_known, _unfound(unfound, *change), jnp.inf)
        error = jnp.hypot(bar.standard_error, remaining)
        bars.append(bar._replace(standard_error=error))
    if space.solutions is not None and space.form_errors is not None:
        u = matmul(S, space.solutions)
        error = _errors_of_forms(space, u, D, t_rhs)
        error = jnp.where(jnp.asarray(earlier > 0), error, jnp.inf)
        # Only errors and degrees of freedom are read.
        bars.append(ErrorBar(error, error, jnp.full_like(error, jnp.inf)))
    return bars


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


def _errors_of_forms(
    space: Truncated,
    u: Inexact[Array, "k q"],
    D: Inexact[Array, "k k"],
    t_rhs: Inexact[Array, "k q"],
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
    T, omega, of_value = space.T, space.omega, space.form_errors
    assert of_value is not None
    k, width = omega.shape
    step, last = jnp.arange(k) // width, space.steps - 1
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
    z = matmul(inverse, t_rhs)
    along = jnp.sum(y.conj() * z, axis=0) / divisor(jnp.sum(squares(y), axis=0))
    z = z - along[None] * y
    of_right = of_steps(squares(z))
    cosines = of_steps(jnp.real(y.conj() * z)) ** 2 / divisor(found * of_right)
    cosine = jnp.sum(cosines, axis=0) / jnp.asarray(space.steps).astype(y.real.dtype)
    left = 2 * of_value * (1 + 2 * part)
    error = error + 2 * jnp.abs(along) * of_value
    return error + 2 * jnp.sqrt(left * of_right[last] * cosine)
