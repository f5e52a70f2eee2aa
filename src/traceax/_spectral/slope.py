r"""Error bars of derivatives of spectral functions.

Of `tr f(A)` the derivative along dA is `tr(C M)`, with the matrix

    M = F o (V^* dA V) + diag(df(theta))

in Ritz vectors V, F of divided differences, and that of sample i is `tr(C_i M)`: the samples
that leave a probe out are those of any matrix on the Krylov space. What the space leaves of
the derivative is not bounded; the last step's change stands for it.
"""

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
from .._linalg.small import matmul
from .._linalg.tall import column_dots, inner
from .control import ColumnControl
from .function import SpectralFunction, divided_differences


class Tests(NamedTuple):
    """What the error bar of a derivative takes of a Krylov space.

    - `left_out`: the spaces without probes, of `shallow` steps.
    - `steps`: of the whole space.
    - `columns`: what controls samples; `None` for nothing.
    """

    left_out: LeftOut
    projected: Projected
    steps: int | Int[Array, ""]
    shallow: int | Int[Array, ""]
    columns: ColumnControl | None

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
    fewer, shallow = tests.steps - 1, tests.shallow - 1
    theta, S = ritz_pairs(T, width * jnp.maximum(fewer, 1))
    # Rounding must not take a node out of the function's domain.
    theta = jnp.clip(theta, jnp.min(pairs.values), jnp.max(pairs.values))
    ends = (pairs.values, pairs.vectors), (theta, S)

    def matrices(theta, S):
        Ms = _matrices(theta, S, D, state.function, tangent.function)
        return [matmul(S, matmul(M, S.conj().T))[:rows, :rows] for M in Ms]

    # Tested by the spaces without a probe of a step less, which lie in both.
    C = coupling_of_fewer(tests.left_out, omega[:rows], n, shallow)
    is_known = jnp.asarray(fewer > 0) & jnp.asarray(shallow > 0)
    errors, freedoms = [], []
    for B, earlier in zip(matrices(*ends[0]), matrices(*ends[1]), strict=True):
        samples, tested = sample_forms(tests.left_out, B)
        if tests.columns is not None:
            samples = samples + tests.columns.of(tested)
        size = jnp.sum(jnp.abs(jnp.diagonal(B)))
        bar = leave_one_out_bar(paired_samples(samples, size))
        change = jnp.abs(jnp.sum(C.T.astype(B.dtype) * (B - earlier)))
        change = jnp.where(is_known, change, jnp.inf)
        errors.append(jnp.hypot(bar.standard_error, change))
        freedoms.append(bar.degrees_of_freedom)
    if solutions is None:
        return errors, freedoms, None
    inside = solutions * pairs.values[:, None].astype(S.dtype)
    right, t_right = matmul(pairs.vectors, inside), tangent.right
    if t_right is not None:
        t_right = inner(pairs.basis, t_right)
    after, before = (_forms(*end, D, right, t_right) for end in ends)
    change = jnp.where(jnp.asarray(fewer > 0), jnp.abs(after - before), jnp.inf)
    return errors, freedoms, change


def _matrices(
    theta: Float[Array, " k"],
    S: Inexact[Array, "k k"],
    D: Inexact[Array, "k k"],
    function: SpectralFunction,
    t_function: SpectralFunction,
) -> list[Inexact[Array, "k k"]]:
    """The matrix M of every leaf."""
    function = function.in_range(theta)
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


def _forms(theta, S, D, right, t_right) -> Float[Array, " q"]:
    """`2 u^* db - u^* dA u` of `u = A^-1 b` of the Krylov space."""
    positive = jnp.where(theta > 0, theta, jnp.inf)[:, None]
    u = matmul(S, inner(S, right) / positive.astype(right.dtype))
    form = -jnp.real(column_dots(u, matmul(D, u)))
    return form if t_right is None else form + 2 * jnp.real(column_dots(u, t_right))
