"""Conformance checks for preconditioners, registered entries and operators."""

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import equinox as eqx
import jax
import jax.flatten_util as jfu
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import numpy as np
from jaxtyping import Array, ArrayLike, Key

from .._arguments import check_key, require
from .._linalg.dense import divisor
from .._linalg.whitening import Preconditioner
from .._operators.check import as_complex, as_data, checked_operator
from .._operators.curvature import HessianLinearOperator
from .._operators.entries import columns_of, diagonal_of
from .._operators.solvers import product_error
from .._operators.space import (
    apply_block,
    is_known,
    is_semidefinite,
    parts_of,
    space_of,
)
from .._preconditioner import check_own


def check_preconditioner(
    preconditioner: Preconditioner,
    operator: lx.AbstractLinearOperator,
    *,
    shift: ArrayLike = 0.0,
) -> None:
    """Checks a [`traceax.Preconditioner`][] for an operator with small order n.

    | check | requirement |
    |---|---|
    | linear | `apply` maps a sum to the sum |
    | adjoint | `apply` and `apply_adjoint` are adjoint matrices |
    | invertible | no singular value of M is 0 relative to the largest |
    | logdet | `logdet` is `-log det (M^* M)` |
    | lower | no eigenvalue of `M (A + shift) M^*` is below `lower` |

    The check takes n products with the operator, and O(n^3) time.

    **Raises:** `AssertionError` that lists every failed check; errors as in
    [`traceax.logdet`][] if sizes or dtypes differ from the operator's.
    """
    where = "traceax.testing.check_preconditioner"
    space = space_of(checked_operator(operator, where))
    check_own(preconditioner, space.size, space.compute_dtype, where)
    one = jnp.eye(space.size, dtype=space.compute_dtype)
    A, M, twice, adjoint = (
        np.asarray(x)
        for x in (
            apply_block(operator, one),
            preconditioner.apply(one),
            preconditioner.apply(2 * one),
            preconditioner.apply_adjoint(one),
        )
    )
    A = A + np.diag(np.broadcast_to(np.asarray(shift), len(A)))
    tolerance = 1e4 * float(jnp.finfo(space.compute_dtype).eps)
    sizes = np.linalg.svd(M, compute_uv=False)
    logdet, claimed = -2 * np.sum(np.log(sizes)), float(preconditioner.logdet)
    values = np.linalg.eigvalsh(M @ A @ M.conj().T)
    lower, unit = preconditioner.lower, tolerance * max(1.0, np.max(np.abs(values)))
    size_of_logdet = np.sum(1 + np.abs(np.log(sizes)))
    wrong = {
        "linear": not _near(twice, 2 * M, tolerance),
        "adjoint": not _near(adjoint, M.conj().T, tolerance),
        "invertible": not sizes[-1] > tolerance * sizes[0] / len(sizes),
        f"logdet, {claimed:.6g} for {logdet:.6g}": (
            not abs(logdet - claimed) <= tolerance * size_of_logdet
        ),
        f"lower, {lower} for {values[0]:.6g}": (
            lower is not None and values[0] < lower - unit
        ),
    }
    report(preconditioner, [x for x, is_wrong in wrong.items() if is_wrong])


def check_entries(operator: lx.AbstractLinearOperator) -> None:
    """Compares registered entries with n products, in O(n^2) memory, for small n.

    [`traceax.columns`][] and [`traceax.diagonal_entries`][] must agree with the
    products: a wrong diagonal gives a wrong number with a short error bar.

    **Raises:** `AssertionError` that lists every failed check; `NotImplementedError` if
    the operator's class hasn't registered both.
    """
    operator = checked_operator(operator, "traceax.testing.check_entries")
    space = space_of(operator)
    A = np.asarray(
        apply_block(operator, jnp.eye(space.size, dtype=space.compute_dtype))
    )
    # We read columns out of order, and one column twice.
    indices = np.append(np.arange(space.size)[::-1], 0)
    columns = columns_of(operator, jnp.asarray(indices, jnp.int32))
    tolerance = 1e4 * float(jnp.finfo(space.compute_dtype).eps)
    wrong = {
        "columns": not _near(columns, A[:, indices], tolerance),
        "diagonal_entries": not _near(diagonal_of(operator), np.diag(A), tolerance),
    }
    report(operator, [x for x, is_wrong in wrong.items() if is_wrong])


def check_operator(key: Key[Array, ""], operator: lx.AbstractLinearOperator) -> None:
    """Checks an operator A and its tags with 30 to 50 random products.

    | check | requirement |
    |---|---|
    | linear | `A (a x + b y) = a A x + b A y`, for short and long vectors; for `a = i` if they are complex |
    | zero | `A 0 = 0`, where an iteration may divide by 0 |
    | symmetric | `y^T A x = x^T A y` |
    | semidefinite, Hermitian | `y^* A x = (x^* A y)^*`, and Ritz values have one sign |
    | diagonal, tridiagonal, triangular | a product with a stretch of a vector ends where it must |
    | unit diagonal | four diagonal entries are 1 |
    | Hessian | a [`traceax.HessianLinearOperator`][] multiplies as differences of gradients do, to 1 % |
    | transpose, adjoint | `A.transpose()` and its conjugate, if they exist, have the same bilinear forms as A |

    Tags are checked if lineax reports them. A tag that is wrong in a few entries can
    pass. Linearity must hold to three digits, because solvers may iterate in a product.
    Everything else must hold to ten times the linearity error, or to rounding.

    **Arguments:** `key`, and `operator`, over arrays or PyTrees, square or not.

    **Raises:** `AssertionError` that lists every failed check; `TypeError` otherwise.
    """
    where, what = "traceax.testing.check_operator", "operator must be a lineax operator"
    hint = "pass (key, operator), and make an operator with traceax.as_operator"
    is_operator = isinstance(operator, lx.AbstractLinearOperator)
    require(is_operator, where, what, operator, hint, TypeError)
    rng = np.random.default_rng(np.asarray(jr.key_data(check_key(key, where))))
    errors, line = _errors(rng, operator), "{}: off by {:.1g}, at most {:.1g} allowed"
    hessians = parts_of(operator, HessianLinearOperator)
    errors = [*errors, *(_gradient_error(rng, hessian) for hessian in hessians)]
    report(operator, [line.format(*x) for x in errors if not x[1] <= x[2]])


def _gradient_error(
    rng: np.random.Generator, hessian: HessianLinearOperator
) -> tuple[str, float, float]:
    """Compares a product with a central difference, whose error a second one shows.

    We take the step for which both agree best. Custom derivative rules, such as
    Danskin's, may hold for first derivatives alone.
    """
    x, unravel = jfu.ravel_pytree(hessian.x)
    direction = rng.normal(size=x.size)
    direction = jnp.asarray(direction / np.linalg.norm(direction), x.dtype)

    @jax.jit
    def gradient(x):
        slopes = jax.grad(lambda x: hessian.fn(x, hessian.args))(unravel(x))
        return jfu.ravel_pytree(slopes)[0]

    eps = float(jnp.finfo(x.dtype).eps)
    product, _ = jfu.ravel_pytree(hessian.mv(unravel(direction)))
    size, candidates = float(jnp.linalg.norm(x)), []
    for i in range(6):
        step = eps ** (1 / 3) * max(size, 1.0) / 10**i
        fine, coarse = (
            (gradient(x + h * direction) - gradient(x - h * direction)) / (2 * h)
            for h in (step, 2 * step)
        )
        # Rounding moves the points, too.
        rounding = 10 * eps * jnp.linalg.norm(gradient(x)) / step
        unit = divisor(jnp.linalg.norm(fine))
        moved = eps * size / step
        allowed = 3 * ((jnp.linalg.norm(fine - coarse) + rounding) / unit + moved)
        error = jnp.linalg.norm(product - fine) / unit
        candidates.append((float(allowed), float(error)))
    known = (x for x in candidates if not math.isnan(x[0]))
    allowed, error = min(known, default=(0.0, math.nan))
    return "Hessian", error, max(0.01, allowed)


def _errors(rng: Any, operator: Any) -> Iterator[tuple[str, float, float]]:
    """Yields each check's name, the operator's error, and the allowed error."""
    A = as_complex(operator)
    space, data, semidefinite = space_of(A), as_data(A), is_semidefinite(A)
    symmetric = is_known(A, lx.is_symmetric) or (semidefinite and not space.is_complex)
    kind, reals = (complex, 2) if space.is_complex else (float, 1)
    X, Y = rng.normal(size=(2, space.size, 4 * reals)).view(kind)
    AX, AY = _product(data, X), _product(data, Y)
    eps = float(jnp.finfo(space.compute_dtype).eps) * space.rounding
    solvers = float(_product_error(A, space.real_dtype) or 0.0)
    limit = max(1e-3, min(100 * eps, 0.1), 100 * solvers)
    least, name = min(1e3 * eps, 0.3), "complex, though linear over the real numbers"
    # Long products must stay below the largest number. A factor of 1 would test nothing.
    largest = np.max(np.abs(AX), initial=np.max(np.abs(X), initial=1))
    most = min((float(jnp.finfo(x.dtype).max) for x in space.leaves), default=math.inf)
    power = np.floor(np.log2(most / 8) - np.log2(largest))
    long = np.exp2(min(8, power or -1))
    pairs = ("linear", -1.7, 0.6), ("linear, for long vectors", long, 0), (name, 1j, 0)
    for name, a, b in pairs[: 1 + reals]:
        expected = a * AX + b * AY
        error = _ratio(_product(data, a * X + b * Y) - expected, expected)
        yield name, error, limit
        if not error <= limit:
            return
        least = max(least, 10 * error)
    yield "zero", _ratio(_product(data, np.zeros_like(X)), AX), least
    W = rng.normal(size=(len(AX), 4 * reals)).view(kind)
    for name, claimed, other, conj in (
        ("symmetric", symmetric, lambda: A, np.asarray),
        ("Hermitian", semidefinite and space.is_complex, lambda: A, np.conj),
        ("transpose", not symmetric, A.transpose, np.asarray),
        ("adjoint", space.is_complex, lambda: lx.conj(A.transpose()), np.conj),
    ):
        with contextlib.suppress(Exception):  # we need no transpose
            if claimed:
                forms = conj(W) * AX, X * conj(_product(as_data(other()), W))
                apart = np.sum(forms[0], axis=0) - np.sum(forms[1], axis=0)
                # We compare with the root sum of squares, a random sum's size.
                yield name, _ratio(apart[None], np.vstack(forms)), least
    if semidefinite:
        unit = np.max(np.abs(AX), initial=0) or 1
        V, _ = np.linalg.qr(np.hstack([X, AX, _product(data, AX / unit)]))
        values = np.linalg.eigvalsh(V.conj().T @ _product(data, V))
        values = values if is_known(A, lx.is_positive_semidefinite) else -values
        yield "semidefinite", _ratio(np.minimum(values, 0), values), least
    n, rows = len(X), np.arange(len(X))[:, None]
    start, stop = np.sort(rng.integers(n + 1, size=(2, 4)), axis=0)
    for name, check, before, after in (
        ("diagonal", lx.is_diagonal, 0, 0),
        ("tridiagonal", lx.is_tridiagonal, 1, 1),
        ("lower triangular", lx.is_lower_triangular, 0, n),
        ("upper triangular", lx.is_upper_triangular, n, 0),
    ):
        if is_known(A, check):
            part = _product(data, np.where((start <= rows) & (rows < stop), X, 0))
            inside = (start - before <= rows) & (rows < stop + after)
            yield name, _ratio(np.where(inside, 0, part), AX), least
    if is_known(A, lx.has_unit_diagonal):
        units = np.where(rows == rng.permutation(n)[:4], 1.0, 0.0)
        error = np.sum(units * (_product(data, units) - 1), axis=0)
        yield "unit diagonal", _ratio(error, 1), least


_compiled, _product_error = eqx.filter_jit(apply_block), eqx.filter_jit(product_error)


def _product(A: lx.AbstractLinearOperator, block: Any) -> Any:
    """The product with a block, as a 64-bit NumPy array."""
    product = np.asarray(_compiled(A, jnp.asarray(block, space_of(A).compute_dtype)))
    return product.astype(np.promote_types(product.dtype, np.float64))


def _ratio(x: Any, y: Any) -> Any:
    """The largest ratio between column norms, 0 for 0 / 0."""
    x, y = (np.linalg.norm(np.atleast_1d(z), axis=0) for z in (x, y))
    return np.max(x / np.where(y == 0, 1, y))


def _near(x, y, tolerance: float) -> bool:
    return bool(np.max(np.abs(np.asarray(x) - y)) <= tolerance * np.max(np.abs(y)))


def report(subject: object, faults: list[str]) -> None:
    """Raises an error that lists the faults, if any."""
    title = f"{type(subject).__name__} fails {len(faults)} of traceax's checks:"
    if faults:
        raise AssertionError("\n- ".join([title, *faults]))
