r"""Derivatives of `tr f(A)` and of forms with the inverse, and their error bars.

Let K be a Krylov basis, theta Ritz values, S their vectors in this basis, and C a
Hermitian matrix with `E[K S C S^* K^*] = I`. The estimate `tr(C f(Theta))` for
`tr f(A)` has the derivative `tr(C M)` with

    M = F o (S^* D S) + diag(df(theta)),    D = K^* dA K,
    F_ij = (f(theta_i) - f(theta_j)) / (theta_i - theta_j),

with fixed K, S and C (Daleckii and Krein; Higham, "Functions of Matrices" (2008),
theorem 3.11, doi:10.1137/1.9780898717778). With `u = A^-1 b` in coordinates of K,
`b^* A^-1 b` has the derivative `2 Re(u^* K^* db) - u^* D u`. So products with dA enter
only through the small matrix D. A *stand-in* holds the fixed blocks.

*Error bars.* Sample i has the derivative `tr(C_i M)`: any matrix on the Krylov space
has leave-one-out samples. The derivative's truncation error has no bracket. We estimate
it from the last step's change in the derivative, and from the change and truncation
error of `tr f(A)`.
"""

import functools as ft
import operator as op
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
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
from .._operators.space import has_one_pass, product_tangent
from .._outcome import Evidence
from .._results import per_entry
from .._rule import Derivative, StandIn
from .bounds import ColumnControl
from .function import (
    SpectralFunction,
    divided_differences,
    final,
    weighted_sums,
)
from .state import SpectralState

# We multiply this many columns at once if their number is only known at run time. A kernel
# computes its entries again for every chunk.
_CHUNK, _CHUNK_OF_ONE_PASS = 64, 256


class RitzStandIn(StandIn):
    r"""Ritz pairs, and the matrix C that makes them a stand-in for the identity.

    - `basis`: K.
    - `theta`, `S`: Ritz values, and their vectors in the basis.
    - `coupling`: C.
    - `count`: the number of pairs, if only known at run time. Further Ritz values are
        copies, and their other entries are 0.
    - `solutions`: `A^-1 B` in Ritz coordinates for right-hand sides B, or `None`.
    - `residuals`: `A A^-1 B - B` for these solutions, or `None` for 0.
    - `evidence`: arrays for the derivatives' error bars, or `None`.
    - `unclipped`: Ritz values with rounding errors below the spectrum, or `None`.
    """

    basis: Inexact[Array, "n p"]
    theta: Float[Array, " p"]
    S: Inexact[Array, "p p"]
    coupling: Inexact[Array, "p p"]
    count: Int[Array, ""] | None = None
    solutions: Inexact[Array, "p q"] | None = None
    residuals: Inexact[Array, "n q"] | None = None
    evidence: Evidence | None = None
    unclipped: Float[Array, " p"] | None = None

    def derivative(self, state, tangent):
        moving = tangent.operator, tangent.function, tangent.rhs, tangent.preconditioner
        if not jtu.tree_leaves(moving):
            return None

        def product_tangents(V):
            return product_tangent(state.operator, tangent.operator, V)

        size = _CHUNK_OF_ONE_PASS if has_one_pass(state.operator) else _CHUNK
        D = self._projected(product_tangents, size)
        t_rhs = tangent.rhs
        t_rhs = None if t_rhs is None else inner(self.basis, t_rhs)
        if jtu.tree_leaves(tangent.preconditioner):
            D, t_rhs = self._after_drift(state, tangent.preconditioner, D, t_rhs)
        parts = self.theta, self.S, self.coupling, self.solutions
        # Second derivatives would need tangents for these parts, so we forbid them.
        theta, S, C, solutions = final(parts, of=(state.operator, state.function))
        function = state.function.in_range(theta)
        values: list[Array | None] = [
            per_entry(ft.partial(_slope, C), f.ndim - 1)(M, f)
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

    def _projected(
        self, products: Callable[[Array], Array | None], size: int
    ) -> Array | None:
        """`K^* products(K)` for the first `count` columns of K, the others being 0."""
        basis = self.basis
        n, p = basis.shape

        def project(chunk):
            out = products(chunk)
            return None if out is None else inner(basis, out)

        if self.count is None or p <= size:
            return project(basis)
        num_chunks = -(-p // size)
        rows = jnp.pad(basis.T, ((0, num_chunks * size - p), (0, 0)))
        chunks = rows.reshape(num_chunks, size, n)
        shape = jax.eval_shape(project, chunks[0].T)
        if shape is None:
            return None

        # We checkpoint inside the condition, too, or JAX stores zeros for skipped chunks.
        @jax.checkpoint
        def project_if_used(start_and_chunk):
            start, chunk = start_and_chunk
            return if_any(start < self.count, jax.checkpoint(project), shape, chunk.T)

        starts = size * jnp.arange(num_chunks, dtype=jnp.int32)
        blocks = jax.lax.map(project_if_used, (starts, chunks))
        return jnp.moveaxis(blocks, 0, 1).reshape(p, -1)[:, :p]

    def _after_drift(
        self,
        state: SpectralState,
        t_preconditioner: PyTree,
        D: Array | None,
        t_rhs: Array | None,
    ) -> tuple[Array | None, Array | None]:
        r"""Adds the derivative of a preconditioner M with fixed factors to D and `K^* db`.

        For `A = M A' M^*`, with `dM = -H M` and H from `drift`, `dA` has the further
        terms `-H A - A H^*`, and db the term `-H b`. We take T for A: this leaves the
        control variate unbiased, since `f'(A) A = I`. But quadratic forms gain digits
        from the residual of their solutions, in `db = H (residual - b)`.
        """

        def drift(V):
            def move(P):
                return P.drift(jax.lax.stop_gradient(V))

            return eqx.filter_jvp(move, (state.preconditioner,), (t_preconditioner,))[1]

        G = self._projected(drift, _CHUNK)
        if G is None:
            return D, t_rhs
        # Clipped Ritz values would bias a sum over all n eigenvalues in 32 bits.
        theta = self.theta if self.unclipped is None else self.unclipped
        T = matmul(self.S * theta[None, :].astype(self.S.dtype), self.S.conj().T)
        GT = matmul(G, jax.lax.stop_gradient(T))
        D = -(GT + GT.conj().T) if D is None else D - GT - GT.conj().T
        if state.rhs is not None:
            start = -state.rhs if self.residuals is None else self.residuals - state.rhs
            change = inner(self.basis, drift(start))
            t_rhs = change if t_rhs is None else t_rhs + change
        return D, t_rhs


def _slope(C: Array, M: Array, f: Array) -> Array:
    """`tr(C M)`, or NaN if f is undefined at a Ritz value."""
    total = jnp.sum(C.T.astype(M.dtype) * M)
    total = total if jnp.iscomplexobj(f) else jnp.real(total)
    return jnp.where(jnp.all(jnp.isfinite(f)), total, jnp.nan)


def slope_matrices(
    theta: Float[Array, " k"],
    S: Inexact[Array, "k k"],
    D: Inexact[Array, "k k"] | None,
    function: SpectralFunction,
    t_function: PyTree,
) -> list[Inexact[Array, "... k k"]]:
    """The matrices M for every leaf, an array that the function returns."""
    changes: list[Array | None] = [None for _ in function(theta)]
    if jtu.tree_leaves(t_function):
        _, changes = eqx.filter_jvp(lambda fn: fn(theta), (function,), (t_function,))
    D_ritz = jnp.zeros_like(S) if D is None else inner(S, matmul(D, S))

    def matrix(F, change):
        dtype = np.result_type(F.dtype, S.dtype)
        # NaN in one entry of an array would spread to the gradients of all others.
        F = jnp.where(jnp.isfinite(F), F, 0)
        M = F.astype(dtype) * D_ritz.astype(dtype)
        # A leaf may depend on only some arrays that the function closes over.
        return M if change is None else M + jnp.diag(change.astype(dtype))

    leaves = zip(divided_differences(function, theta, theta), changes, strict=True)
    return [per_entry(matrix, F.ndim - 2)(F, change) for F, change in leaves]


#
# Error bars
#


class Exact(NamedTuple):
    """All eigenpairs, for error bars of an exact answer's derivatives."""

    theta: Float[Array, " n"]
    S: Inexact[Array, "n n"]
    solutions: Inexact[Array, "n q"] | None


def bars_from_eigenvectors(
    exact: Exact, function: SpectralFunction, products: tuple[Any, Any, Any]
) -> list[ErrorBar]:
    """Rounding errors in exact derivatives, `tr(f'(A) dA)` and quadratic forms.

    Errors eps |A| in eigenvalues change f'(A), and entries in dA may cancel.
    """
    (theta, S, coordinates), (D, t_function, t_rhs) = exact, products
    eps, size = jnp.finfo(theta.dtype).eps, jnp.max(jnp.abs(theta))
    dA = frobenius(D)
    function = function.in_range(theta)
    # The diagonals hold f', with infinite values replaced.
    exactly, moved = (
        [
            jnp.diagonal(F, axis1=-2, axis2=-1)
            for F in divided_differences(function, x, x)
        ]
        for x in (theta, theta + eps * size)
    )

    def slope_bar(x, y, M):
        bound = dA * (jnp.linalg.norm(y - x) + eps * jnp.linalg.norm(x))
        value = jnp.trace(M)
        error = bound + len(theta) * eps * jnp.abs(value)
        return ErrorBar(value, error, jnp.full_like(error, jnp.inf))

    Ms = slope_matrices(theta, S, D, function, t_function)
    leaves = zip(exactly, moved, Ms, strict=True)
    bars = [per_entry(slope_bar, leaf[0].ndim - 1)(*leaf) for leaf in leaves]
    if coordinates is not None:
        u = matmul(S, coordinates)
        forms = 2 * jnp.real(column_dots(u, t_rhs)) - jnp.real(
            column_dots(u, matmul(D, u))
        )
        condition = size / jnp.maximum(jnp.min(theta), eps * size)
        bound = 2 * eps * condition * dA * jnp.sum(squares(coordinates), axis=0)
        error = bound + len(theta) * eps * jnp.abs(forms)
        bars.append(ErrorBar(forms, error, jnp.full_like(error, jnp.inf)))
    return bars


class Truncated(NamedTuple):
    """A Krylov space and its truncation errors.

    - `omega`: coordinates of the starting vectors in the basis.
    - `theta`, `S`: Ritz values and vectors.
    - `n`, `q`: the numbers of unknowns and right-hand sides.
    - `steps`, `shallow`: steps for the space, and for the spaces without a probe.
    - `most_left_out`: the largest `shallow` for which arrays have room.
    - `columns`: the control variate from columns, or `None`.
    - `solutions`: the solutions in Ritz coordinates, or `None`.
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
    leaf_errors: list[Float[Array, "..."]]
    form_errors: Float[Array, " q"] | None

    @property
    def T(self) -> Inexact[Array, "k k"]:
        return matmul(
            self.S * self.theta[None, :].astype(self.S.dtype), self.S.conj().T
        )


def bars_from_krylov(
    space: Truncated, function: SpectralFunction, products: tuple[Any, Any, Any]
) -> list[ErrorBar]:
    """Error bars for the derivatives of every leaf and of quadratic forms."""
    T, omega, (D, t_function, t_rhs) = space.T, space.omega, products
    width, n = omega.shape[1], space.n
    rows = width * space.most_left_out
    left_out = leave_probes_out(
        T[:rows, :rows], omega[:rows], n, space.shallow, space.q
    )
    D = (D + D.conj().T) / 2
    earlier, shallow = space.steps - 1, space.shallow - 1
    theta, S = ritz_pairs(T, width * jnp.maximum(earlier, 1))
    # We clip, or f could be undefined at a node after rounding.
    theta = jnp.clip(theta, jnp.min(space.theta), jnp.max(space.theta))
    before, after = (theta, S), (space.theta, space.S)
    function = function.in_range(space.theta)
    # For both we use spaces without a probe after one step fewer: both contain these.
    C = coupling_of_fewer(left_out, omega[:rows], n, shallow)

    def sums(theta, S):
        """`tr(C f(T))`, `tr(C M)` and M for every leaf."""
        coupling = inner(S[:rows], matmul(C, S[:rows]))
        weights = jnp.real(jnp.diagonal(coupling))
        Ms = slope_matrices(theta, S, D, function, t_function)
        values = [weighted_sums(weights, f) for f in function(theta)]

        def slope(M):
            return jnp.sum(coupling.T.astype(M.dtype) * M)

        return (values, [per_entry(slope, M.ndim - 2)(M) for M in Ms]), Ms

    (sums_before, _), (sums_after, Ms) = sums(*before), sums(*after)
    change = jtu.tree_map(lambda x, y: jnp.abs(x - y), sums_before, sums_after)
    changes = zip(*change, strict=True)
    S = space.S
    is_known = jnp.asarray(earlier > 0) & jnp.asarray(shallow > 0)

    def slope_bar(M, leaf_error, change):
        B = matmul(S[:rows], matmul(M, S[:rows].conj().T))
        samples, tested = sample_forms(left_out, B)
        if space.columns is not None:
            samples = samples + space.columns.corrections(tested)
        size = jnp.sum(jnp.abs(jnp.diagonal(B)))
        bar = leave_one_out_bar(paired_samples(samples, size))
        remaining = jnp.where(is_known, slope_error(leaf_error, *change), jnp.inf)
        error = jnp.hypot(bar.standard_error, remaining)
        return bar._replace(standard_error=error)

    bars = [
        per_entry(slope_bar, M.ndim - 2)(M, *errors)
        for M, *errors in zip(Ms, space.leaf_errors, changes, strict=True)
    ]
    if space.solutions is not None and space.form_errors is not None:
        u = matmul(S, space.solutions)
        error = _errors_of_forms(space, u, D, t_rhs)
        error = jnp.where(jnp.asarray(earlier > 0), error, jnp.inf)
        # Callers read only errors and degrees of freedom, so the mean is a dummy.
        bars.append(ErrorBar(error, error, jnp.full_like(error, jnp.inf)))
    return bars


def slope_error(
    value_error: Float[Array, "*s"],
    change: Float[Array, "*s"],
    slope_change: Float[Array, "*s"],
) -> Float[Array, "*s"]:
    """Truncation error of a derivative, from the function's truncation error.

    The latter is a fraction r of the function's change in the last step. Derivatives
    converge later, and `value_error` is half a bracket with f(T) at one end. So we
    multiply the derivative's change by 3 r, at most 1. If r is above 1, the function
    has not converged, and we multiply by r, at most 1.5. With two kernels and a spin
    chain, the true error was 0.2 to 1.7 times this estimate, up to rounding.
    """
    r = value_error / divisor(change)
    return slope_change * jnp.clip(r, jnp.minimum(3 * r, 1), 1.5)


def _errors_of_forms(
    space: Truncated,
    u: Inexact[Array, "k q"],
    D: Inexact[Array, "k k"],
    t_rhs: Inexact[Array, "k q"],
) -> Float[Array, " q"]:
    r"""Errors in `2 u^* db - u^* dA u`, for the approximation u to `A^-1 b`.

    An error e in u causes the error `2 <e, A^-1 db>`, in the inner product of A, in the
    first term. With a Cholesky factor `T = R R^*`, the blocks in

        y = R^* u = R^-1 b ,    z = R^-1 db

    belong to single steps and are orthogonal: the term is `2 sum_j y_j^* z_j`, and
    `|e|^2` sums `|y_j|^2` over the steps to come. Its bracket has the length
    `2 value_error`; a larger error spreads over more steps. For `|z_j|` we take the
    last one, and for the cosine between y_j and z_j the root mean square, because a
    single `y_j^* z_j` may be 0 by chance. The part of db along b has the error of
    `b^* u`.

    The second term changes with every `|y_j|`. We multiply its last change by the ratio r
    between `|e|^2 = value_error` and the last `|y_j|^2`, as for r further steps of equal
    size, up to the number taken; or by the root of r, if it is below 1.
    """
    T, omega, value_error = space.T, space.omega, space.form_errors
    assert value_error is not None
    k, width = omega.shape
    step, last = jnp.arange(k) // width, space.steps - 1
    taken, unit = step <= last, jnp.eye(k, dtype=T.dtype)
    R, inverse = cholesky(jnp.where(taken[:, None] & taken[None], T, unit))

    def step_sums(x):
        return jnp.sum(x.reshape(k // width, width, -1), axis=1)

    y = inner(R, u)
    y_squares = step_sums(squares(y))
    before = u - inner(inverse, jnp.where((step == last)[:, None], y, 0))
    forms = (jnp.real(column_dots(x, matmul(D, x))) for x in (u, before))
    rest = value_error / divisor(y_squares[last])
    part = jnp.minimum(rest, 1)
    most = jnp.asarray(space.steps).astype(rest.dtype)
    steps_to_come = jnp.minimum(jnp.maximum(rest, jnp.sqrt(rest)), most)
    error = jnp.abs(op.sub(*forms)) * steps_to_come
    z = matmul(inverse, t_rhs)
    along = jnp.sum(y.conj() * z, axis=0) / divisor(jnp.sum(squares(y), axis=0))
    z = z - along[None] * y
    z_squares = step_sums(squares(z))
    cosines = step_sums(jnp.real(y.conj() * z)) ** 2 / divisor(y_squares * z_squares)
    cosine = jnp.sum(cosines, axis=0) / jnp.asarray(space.steps).astype(y.real.dtype)
    remaining = 2 * value_error * (1 + 2 * part)
    error = error + 2 * jnp.abs(along) * value_error
    return error + 2 * jnp.sqrt(remaining * z_squares[last] * cosine)
