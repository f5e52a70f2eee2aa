"""How a call is answered."""

import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import pytest

import traceax as tx
from traceax._plan import ExactAnswer, make_plan
from traceax._spectral.state import init_spectral_state
from traceax._state import init_state
from traceax._tolerance import NO_PROGRESS_METER, make_stop

ALL = "exact by all {} products"
# Estimator, n, k, a tolerance or none, and the plan.
CASES = [
    ("XTrace", 100, 22, False, "22 products by XTrace"),
    ("XTrace", 100, 100, False, ALL),
    ("XTrace", 100, 1000, False, ALL),
    ("Hutchinson", 1, 1, False, ALL),
    ("XTrace", 100, 22, True, "to a tolerance by XTrace, at most 22 products"),
    ("XTrace", 100, 100, True, ALL),
    (
        "Hutchinson",
        *(100, 140, True),
        "to a tolerance by Hutchinson, at most 40 products, else exact by all 100",
    ),
    (
        "XTrace",
        *(100, None, True),
        "to a tolerance by XTrace, at most 99 products, else exact by all 100",
    ),
    ("XTrace", 32, None, True, ALL),
    ("XTrace", 5000, None, True, "to a tolerance by XTrace, at most 1000 products"),
    ("KrylovAware", 100, 22, False, "22 products by KrylovAware"),
    ("KrylovAware", 32, None, False, ALL),
    (
        "KrylovAware",
        *(100, None, False),
        "to convergence by KrylovAware, at most 99 products",
    ),
    (
        "KrylovAware",
        *(5000, None, False),
        "to convergence by KrylovAware, at most 1000 products",
    ),
]


def _plan(name, n, k, tolerance, exact=None):
    estimator = getattr(tx, f"{name}Estimator")()
    operator = lx.DiagonalLinearOperator(jnp.ones(n))
    operator = lx.TaggedLinearOperator(operator, lx.positive_semidefinite_tag)
    if name == "KrylovAware":
        state = init_spectral_state("test", jr.key(0), operator, jnp.log, None, True)
    else:
        state = init_state(jr.key(0), operator)
    dtype = state.space.compute_dtype
    rtol = 0.1 if tolerance else None
    stop = make_stop(rtol, None, 0.95, NO_PROGRESS_METER, dtype, "test")
    return make_plan(estimator, state, k, stop, NO_PROGRESS_METER, "test", exact)


@pytest.mark.parametrize(("name", "n", "k", "tolerance", "words"), CASES)
def test_plans(name, n, k, tolerance, words):
    assert str(_plan(name, n, k, tolerance)) == words.format(n)


def test_an_exact_answer_precedes_products():
    exact = ExactAnswer("Cholesky", lambda state: state)
    assert str(_plan("KrylovAware", 100, 22, True, exact)) == "exact by Cholesky"


def test_a_resumed_plan_counts_earlier_products():
    operator = lx.MatrixLinearOperator(jnp.diag(jnp.arange(1.0, 101.0)))
    estimator = tx.XTraceEstimator()
    state = estimator.estimate(estimator.init(jr.key(0), operator), 20).state
    plan = make_plan(estimator, state, 12, None, NO_PROGRESS_METER, "test")
    assert str(plan) == "32 products by XTrace"


def test_a_plan_needs_a_budget_or_a_tolerance():
    with pytest.raises(TypeError, match="k must be a Python int"):
        _plan("XTrace", 100, None, False)
