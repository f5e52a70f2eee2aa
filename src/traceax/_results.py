"""What became of an estimate: the result of each value, and what follows from it."""

import functools as ft
import operator as op
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import jax.tree_util as jtu
from jaxtyping import Array, Bool, PyTree


class RESULTS(eqx.Enumeration):
    """What became of an estimate: `successful`, or what went wrong and the mend.

    Compare with `==`; `RESULTS[estimate.result]` is the message.
    """

    successful = ""
    nonfinite = (
        "The estimate is not finite: the operator's parameters hold NaN or infinite "
        "values; or the operator returned NaN or infinite values from finite parameters "
        "(a division by zero, a logarithm or root of a negative number, a linear solve "
        "that failed); or products with it, or the sums that are taken of them, exceed "
        "the largest number of their dtype; or a basis of products could not be made "
        "orthonormal. Check the parameters, what the operator "
        "computes and its solvers; scale the operator down and the estimate up again, or "
        "use a dtype of wider range."
    )
    not_semidefinite = (
        "The operator is tagged positive (or negative) semidefinite, or a likelihood needs "
        "it to be, but its products or its Cholesky factorisation show that it is not. "
        "Remove the tag, or use an estimator that does not need it, such as "
        "traceax.XTraceEstimator. Rounding makes eigenvalues of a covariance negative that "
        "are near 0: increase its noise, or use 64 bits."
    )
    not_hermitian = (
        "A function of the operator's eigenvalues was asked for, but its products show "
        "that it is not symmetric (complex: Hermitian). Check what it computes; "
        "functions of other operators are not estimated."
    )
    below_lower = (
        "The operator has an eigenvalue below the number that none is said to be below, by "
        "more than rounding: `lower`, the shift of an operator that is tagged positive "
        "semidefinite, or the noise of a likelihood, beside which the covariance must be "
        "positive semidefinite. Give a number below the spectrum, or none; or remove the tag."
    )
    noise_not_positive = (
        "The noise is not positive, or rounds to 0: `shift` of a likelihood, or of a "
        "preconditioner. Keep it positive, by its logarithm as a parameter for example, and "
        "above the smallest number of its dtype."
    )
    y_not_finite = (
        "y, the observations of a likelihood, holds NaN or infinite numbers, and so nothing "
        "is known of it. Leave these rows out, of y, of the operator (the points of a "
        "kernel) and of `shift`; or give each of them a finite y, such as 0, and a large "
        "noise, such as 1e10 in `shift`."
    )
    tolerance_not_met = (
        "The tolerance was not met with the products that were allowed. "
        "The value and its error bar are those of the products that were taken; "
        'stats["products_needed"] is how many it would take at this rate, and n at most, '
        "which give the exact answer without a tolerance. Allow for more products, 2 n to "
        "be sure, or a larger tolerance. That number is infinite where it is not known, and "
        "where an iterative solver within the operator leaves too large an error: give the "
        "solver a smaller tolerance then."
    )
    outside_domain = (
        "The function is not finite at an eigenvalue of the operator, such as a "
        "logarithm at 0 or of a negative number, or at one that rounding can't tell from "
        "it. Shift the operator (traceax.logdet takes shift=), check that it is positive "
        "definite, or give a function that is finite on its spectrum. Rounding hides "
        "eigenvalues, and a shift, of less than about 1e-6 (32 bits) or 2e-15 (64 bits) "
        'of the largest eigenvalue, which stats["ritz_values"] shows: take a larger shift, '
        "or 64 bits: jax.config.update('jax_enable_x64', True)."
    )


def _is_result(x: object) -> bool:
    return isinstance(x, type(RESULTS.successful))


def map_results(fn: Callable[..., Any], result: PyTree[RESULTS], *trees: Any) -> PyTree:
    """`fn(result, *parts)` for each result, and the part of each tree that it is about."""
    return jtu.tree_map(fn, result, *trees, is_leaf=_is_result)


def results_of(result: PyTree[RESULTS]) -> list[RESULTS]:
    return jtu.tree_leaves(result, is_leaf=_is_result)


def any_unmet(result: PyTree[RESULTS]) -> Bool[Array, "..."]:
    unmet = [x == RESULTS.tolerance_not_met for x in results_of(result)]
    return ft.reduce(op.or_, unmet)


def has_failed(result: RESULTS) -> Bool[Array, "..."]:
    """Whether a value must not be used."""
    return (result != RESULTS.successful) & (result != RESULTS.tolerance_not_met)


def finite_or_failed(value: PyTree[Array], result: PyTree[RESULTS]) -> Any:
    """`result`, or that the value that is returned isn't finite."""

    def check(result, value):
        leaves = jtu.tree_leaves(value)
        finite = jnp.stack([jnp.isfinite(x).all() for x in leaves]).all()
        failed = ~finite & (result == RESULTS.successful)
        return RESULTS.where(failed, RESULTS.nonfinite, result)

    return map_results(check, result, value)
