r"""The primitive `estimate_trace`, and the one derivative rule of the library.

An estimator returns, besides its value, two blocks V and Z (n x p) such that `V Z^*` is
an unbiased stand-in for the derivative of the functional with respect to the operator.
The value is then given the derivative

    d value = <Z, dA V> = sum_j z_j^* (dA v_j),    V and Z held fixed.

For a trace the true derivative is `tr dA`, and `E[V Z^*] = I` makes the rule unbiased,
to every order: the rule is linear in dA, and the second derivative of `tr A(t)` is
`tr A''(t)`, paired with the same blocks.

The rule never binds the primitive on tangents. It binds it once on the primals, asks
for the blocks, and differentiates "apply the operator to the fixed block V", which JAX
can transpose by itself; of a number of columns that is known at run time only,
`_pairing.py` transposes it. So nothing differentiates through a factorisation or a loop
of an estimator, and an estimator may use anything inside `compute`.
"""

from typing import Any, NamedTuple

import equinox as eqx
import equinox.internal as eqxi
import jax
import jax.core
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jaxtyping import Array, Float, Inexact, PyTree

from ._estimate import RESULTS, UNKNOWN
from ._failure import explain, solves_systems
from ._frechet import SpectralBlocks
from ._leaves import of_array_leaves
from ._operator import space_of
from ._pairing import pair
from ._spectral_function import SpectralFunction
from ._staging import Staged, make_primitive


class Outcome(NamedTuple):
    """What the primitive returns; of a function with several results, lists."""

    value: PyTree[Inexact[Array, ""]]
    standard_error: PyTree[Float[Array, ""]]  # `UNKNOWN` for NaN
    result: RESULTS
    stats: dict[str, PyTree[Array]]
    kept: PyTree[Array] | None  # for a later estimate to go on from


class Problem(NamedTuple):
    """What the primitive is bound on. Differentiable are `operator` and `function`."""

    operator: PyTree
    function: PyTree  # of eigenvalues; `None` for a trace
    estimator: Any
    rest: PyTree  # the state but for its operator
    k: int
    real: bool  # whether the value is known to be real


def _operator(state: PyTree) -> list[PyTree]:
    return [state.operator]


def _operator_and_function(state: PyTree) -> list[PyTree]:
    return [state.operator, state.function]


def _evaluate(problem: Problem):
    operator, function, estimator, rest, k, real = problem
    space = space_of(operator)
    where, parts = _operator, [operator]
    if function is not None:
        where, parts = _operator_and_function, [operator, function]
    state = eqx.tree_at(where, rest, parts, is_leaf=lambda x: x is None)
    value, standard_error, stats, blocks = estimator.evaluate(state, k)
    # A new dictionary: `stats` may belong to the estimator.
    defaults = {"degrees_of_freedom": jnp.inf, "largest_product": jnp.nan}
    stats = {**defaults, **stats}
    kept = stats.pop("kept", None)
    value, standard_error = jtu.tree_map(jnp.asarray, (value, standard_error))
    result = explain(
        stats.pop("result", RESULTS.successful),
        jnp.stack(jtu.tree_leaves(value)),
        operator,
        jnp.asarray(stats.pop("largest_product")),
        # Of the state: asked about before, it isn't traced again.
        solves=solves_systems(state.operator),
    )
    real_dtype = jnp.finfo(space.dtype).dtype

    def finished(value):
        if real or (function is not None and not jnp.iscomplexobj(value)):
            return jnp.real(value).astype(real_dtype)
        return value.astype(
            np.result_type(space.dtype, value.dtype)
            if function is not None
            else space.dtype
        )

    def error_bar(value, standard_error):
        standard_error = jnp.real(standard_error).astype(real_dtype)
        known = jnp.isfinite(value) & ~jnp.isnan(standard_error)
        unknown = jax.lax.full_like(standard_error, UNKNOWN)
        return jax.lax.select(known, standard_error, unknown)

    standard_error = jtu.tree_map(error_bar, value, standard_error)
    value = jtu.tree_map(finished, value)
    stats = jtu.tree_map(_as_array, stats)
    return Outcome(value, standard_error, result, stats, kept), blocks


def _as_array(x):
    return jnp.asarray(x, jnp.int32) if isinstance(x, int) else jnp.asarray(x)


_evaluate_once = Staged(_evaluate)


@Staged
def _implementation(problem, blocks):
    outcome, found = _evaluate_once(problem)
    return (outcome, found) if blocks else outcome


def _jvp(primals, tangents):
    problem, blocks = primals
    problem = jtu.tree_map(_as_jax_array, problem)
    t_problem = tangents[0]
    outcome, frozen = eqxi.filter_primitive_bind(estimate_trace_p, problem, True)
    if isinstance(frozen, SpectralBlocks):
        t_value = frozen.tangents(
            problem.function,
            problem.operator,
            t_problem.function,
            t_problem.operator,
        )
    else:
        t_value = pair(problem.operator, t_problem.operator, frozen)
    t_value = _like(outcome.value, t_value)
    t_outcome = jtu.tree_map(lambda _: None, outcome)._replace(value=t_value)
    if not blocks:
        return outcome, t_outcome
    return (outcome, frozen), (t_outcome, jtu.tree_map(lambda _: None, frozen))


def _as_jax_array(x):
    # Constants of a staged program come as a subclass of NumPy's arrays, which operators
    # need not know.
    staged = isinstance(x, np.ndarray) and type(x) is not np.ndarray
    return jnp.asarray(x) if staged else x


def _like(value, t_value):
    """The tangent, of the value's structure and dtype; `None`s if there is none."""
    if t_value is None:
        return jtu.tree_map(lambda _: None, value)

    def cast(x, t_x):
        return (t_x if jnp.iscomplexobj(x) else jnp.real(t_x)).astype(x.dtype)

    return jtu.tree_map(cast, value, t_value)


def _transpose(*args, **kwargs):
    # Unreachable: the rule above leaves operator code, and `pair`, to transpose.
    raise NotImplementedError("estimate_trace is not linear in any argument.")


estimate_trace_p = make_primitive(
    "estimate_trace", _implementation, _implementation.abstract, _jvp, _transpose
)


def estimate_trace(estimator, state: PyTree, k: int, *, real: bool) -> Outcome:
    """Binds the primitive on an estimator and its state.

    The operator, and the function of its eigenvalues if the state has one, are
    differentiable; every other leaf is stopped.
    """
    function, where = getattr(state, "function", None), _operator_and_function
    if not isinstance(function, SpectralFunction):
        function, where = None, _operator
    rest = eqx.tree_at(where, state, replace_fn=lambda _: None)
    arrays, static = eqx.partition((estimator, rest), eqx.is_array)
    estimator, rest = eqx.combine(jax.lax.stop_gradient(arrays), static)

    def bind(operator):
        problem = Problem(operator, function, estimator, rest, k, real)
        return eqxi.filter_primitive_bind(estimate_trace_p, problem, False)

    return of_array_leaves(bind, state.operator)
