"""Results: whether each value in an estimate succeeded, or how it failed."""

import functools as ft
import operator as op
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jaxtyping import Array, Bool, PyTree


class RESULTS(eqx.Enumeration):
    """Whether an estimate is `successful`, or how it failed and the remedy.

    Compare items with `==`. `RESULTS[estimate.result]` is the message.
    """

    successful = ""
    nonfinite = (
        "The estimate is not finite: the operator's parameters hold NaN or infinite "
        "values; or the operator returned NaN or infinite values from finite parameters "
        "(a division by zero, a logarithm or root of a negative number, a linear solve "
        "that failed); or products with it, or sums over products, exceed the largest "
        "number in their dtype; or products could not be orthonormalised. Check the "
        "operator's parameters, computation and solvers; scale the operator down and the "
        "estimate up again, or use a dtype with a wider range."
    )
    not_semidefinite = (
        "The operator is not semidefinite, as its products or its Cholesky factorisation "
        "show, but it is tagged positive (or negative) semidefinite, or a likelihood needs "
        "it to be. Remove the tag, or use an estimator that does not need it, such as "
        "traceax.XTraceEstimator. For a covariance, rounding can make eigenvalues near 0 "
        "negative: increase its noise, or use 64 bits."
    )
    not_hermitian = (
        "The operator is not symmetric (complex: Hermitian), as its products show, but a "
        "function of its eigenvalues was requested. Check what the operator computes. For "
        "the log-determinant of I - rho D^-1 B with a symmetric B and a diagonal D, such as "
        "row sums, pass I - rho D^-1/2 B D^-1/2, which is symmetric and has the same "
        "eigenvalues. For any other matrix A, log |det A| is half of the log-determinant "
        "of A.T @ A (complex: its adjoint times A)."
    )
    not_linear = (
        "The operator is not linear over the complex numbers, as a product with 1j times a "
        "vector shows: it takes conjugates, or real or imaginary parts, of complex vectors. "
        "So it has no trace and no eigenvalues. Write it as a function of real and imaginary "
        "parts, on a PyTree with two real leaves."
    )
    below_lower = (
        "The operator has an eigenvalue below its lower bound, by more than rounding. The "
        "bound is `lower`; or the shift, if the operator is tagged positive semidefinite; "
        "or the noise in a likelihood, which adds a positive semidefinite covariance to "
        "it. Pass a number below the spectrum, or none; or remove the tag."
    )
    noise_not_positive = (
        "The noise, `shift` in a likelihood or with a preconditioner, is not positive or "
        "rounds to 0. Keep it positive, for example with its logarithm as the parameter, "
        "and above the smallest number in its dtype. For no noise, pass the number 0 itself, "
        "not an array."
    )
    y_not_finite = (
        "y, the observations in a likelihood, holds NaN or infinite numbers, so the "
        "likelihood is unknown. Leave these rows out in y, in the operator (the points in "
        "a kernel) and in `shift`; or give each row a finite y, such as 0, and a large "
        "noise, such as 1e10 in `shift`."
    )
    tolerance_not_met = (
        "The tolerance was not met with the allowed products. The value and its error bar "
        'follow from the products taken; stats["products_needed"] is the number that the '
        "tolerance would take at this rate, at most n, since n products without a "
        "tolerance give the exact answer. Allow more products (2 n suffice) or a "
        "larger tolerance. The number is infinite if it is unknown, or if the error from "
        "an iterative solver within the operator is too large: give the solver a smaller "
        "tolerance then."
    )
    outside_domain = (
        "The function is not finite at an eigenvalue of the operator, or at a number that "
        "equals one up to rounding, such as a logarithm at or below 0. Shift the operator "
        "(traceax.logdet takes shift=), check that it is positive definite, or pass a "
        "function that is finite on its spectrum. Rounding hides eigenvalues and shifts "
        "below about 1e-6 (32 bits) or 2e-15 (64 bits) times the largest eigenvalue, which "
        'stats["ritz_values"] shows: use a larger shift, or 64 bits: '
        "jax.config.update('jax_enable_x64', True)."
    )


def _is_result(x: object) -> bool:
    return isinstance(x, type(RESULTS.successful))


def per_entry(fn: Callable, entries: int) -> Callable:
    """`fn` for scalars, applied to every entry of arrays with `entries` leading axes."""
    for _ in range(entries):
        fn = jax.vmap(fn)
    return fn


def map_results(fn: Callable[..., Any], result: PyTree[RESULTS], *trees: Any) -> PyTree:
    """Applies `fn(result, *parts)` to each result, or entry of one, and its part of each
    tree."""

    def apply(result, *parts):
        return per_entry(fn, has_failed(result).ndim)(result, *parts)

    return jtu.tree_map(apply, result, *trees, is_leaf=_is_result)


def results_of(result: PyTree[RESULTS]) -> list[RESULTS]:
    return jtu.tree_leaves(result, is_leaf=_is_result)


def any_unmet(result: PyTree[RESULTS]) -> Bool[Array, "..."]:
    unmet = [jnp.any(x == RESULTS.tolerance_not_met) for x in results_of(result)]
    return ft.reduce(op.or_, unmet)


def has_failed(result: RESULTS) -> Bool[Array, "..."]:
    """Whether a value must not be used."""
    return (result != RESULTS.successful) & (result != RESULTS.tolerance_not_met)


def first_failure(result: RESULTS) -> RESULTS:
    """The first failed entry among several, or one of them if none failed."""
    failed = has_failed(result)
    if failed.ndim == 0:
        return result
    return jtu.tree_map(lambda x: jnp.ravel(x)[jnp.argmax(failed)], result)


def finite_or_failed(value: PyTree[Array], result: PyTree[RESULTS]) -> Any:
    """`result`, with `nonfinite` for each success whose value isn't finite."""

    def check_part(result, value):
        leaves = jtu.tree_leaves(value)
        is_finite = jnp.stack([jnp.isfinite(x).all() for x in leaves]).all()
        is_nonfinite = ~is_finite & (result == RESULTS.successful)
        return RESULTS.where(is_nonfinite, RESULTS.nonfinite, result)

    return map_results(check_part, result, value)
