r"""The primitive of all estimates, and the one derivative rule of the library.

An estimator returns, besides its value, two blocks V and Z (n x p) such that `V Z^*` is
an unbiased stand-in for the derivative of the functional with respect to the operator.
The value is then given the derivative

    d value = <Z, dA V> = sum_j z_j^* (dA v_j),    V and Z held fixed.

For a trace the true derivative is `tr dA`, and `E[V Z^*] = I` makes the rule unbiased,
to every order: the rule is linear in dA, and the second derivative of `tr A(t)` is
`tr A''(t)`, paired with the same blocks.

The rule never binds the primitive on tangents. It binds it once on the primals, asks
for the blocks, and differentiates "apply the operator to the fixed block V", which JAX
can transpose by itself. So nothing differentiates through a factorisation or a loop of
an estimator, and an estimator may use anything inside `compute`.
"""

import abc
from typing import Any, NamedTuple, NoReturn

import equinox as eqx
import equinox.internal as eqxi
import jax
import jax.core
import jax.numpy as jnp
import jax.tree_util as jtu
import lineax as lx
import numpy as np
from jaxtyping import Array, ArrayLike, Float, Inexact, Int, PyTree

from ._accuracy.error_bar import exact_bar
from ._estimate import SLOPES
from ._functional import Functional, Trace
from ._linalg.tall import side_by_side
from ._linalg.types import alike, automatic, fold
from ._operators.block import (
    apply_block,
    columns_at_once,
    derived,
    jitted,
    space_of,
)
from ._operators.entries import diagonal_by_products, unit_columns, unit_vectors
from ._operators.solvers import solver_tolerance
from ._results import RESULTS, finite_or_failed
from ._state import functional_of


class Outcome(NamedTuple):
    """An estimate's arrays; of a function with several results, PyTrees of scalars."""

    value: PyTree[Inexact[Array, "..."]]
    standard_error: PyTree[Float[Array, "..."]]  # infinite where it cannot be known
    result: PyTree[RESULTS]
    stats: dict[str, PyTree]
    kept: PyTree[Array] | None  # for a later estimate to go on from


def make_outcome(
    value: PyTree[Inexact[Array, "..."]],
    standard_error: PyTree[Float[Array, "..."]],
    stats: dict[str, PyTree],
    dtype: Any,
    *,
    real: bool,
) -> Outcome:
    """An outcome from what `compute` returns, for an operator of that dtype."""
    # A new dictionary: `stats` may belong to the estimator.
    stats = {"degrees_of_freedom": jnp.inf, **stats}
    kept, result = stats.pop("kept", None), stats.pop("result", RESULTS.successful)
    value, standard_error = jtu.tree_map(jnp.asarray, (value, standard_error))
    real_dtype = jnp.finfo(dtype).dtype

    def cast(x):
        return jnp.real(x).astype(real_dtype) if real else x.astype(dtype)

    def bar(x, error):
        error = jnp.real(error).astype(real_dtype)
        known = jnp.isfinite(x) & ~jnp.isnan(error)
        return jnp.where(known, error, jnp.inf)

    def as_array(x):
        return jnp.asarray(x, jnp.int32) if isinstance(x, int) else jnp.asarray(x)

    standard_error = jtu.tree_map(bar, value, standard_error)
    stats = jtu.tree_map(as_array, stats)
    value = jtu.tree_map(cast, value)
    result = finite_or_failed(value, result)
    return Outcome(value, standard_error, result, stats, kept)


def with_solvers(value: Any, error: Any, share: ArrayLike | None) -> Any:
    """The standard error of a value, with that of solvers, a share of it."""
    if share is None:
        return error
    return jtu.tree_map(lambda x, y: jnp.hypot(y, share * jnp.abs(x)), value, error)


class StandIn(eqx.Module):
    """Abstract base class of the blocks that a value's derivative is made of."""

    @abc.abstractmethod
    def derivative(self, state: PyTree, tangent: PyTree) -> PyTree[Array] | None:
        """The derivative of the value. `None` stands for 0, there and among tangents.

        Of a state only the operator, and the function of its eigenvalues, are
        differentiated. Linear in their tangents, for JAX to transpose.
        """

    def slope(self, state: PyTree, tangent: PyTree) -> tuple[Any, ...] | None:
        """The derivative, its standard error and degrees of freedom. Optional."""
        refuse_slope()


def refuse_slope() -> NoReturn:
    raise NotImplementedError(
        "traceax.jvp: derivatives of this estimate have no error bar; use jax.jvp of "
        "its value, or one of traceax.HutchinsonEstimator, HutchPlusPlusEstimator, "
        "XTraceEstimator, XNysTraceEstimator, AdaptiveXTraceEstimator and "
        "KrylovAwareEstimator, of a trace or a spectral function; diagonals have none."
    )


class Algorithm(eqx.Module):
    """Abstract base class of what the primitive evaluates."""

    @abc.abstractmethod
    def run(self, state: PyTree, k: int, stop: Any) -> tuple[Outcome, StandIn]:
        """The estimate from k products at most, and what stands in for its derivative."""


#
# The primitive
#


# Jitted, so that JAX's trace cache serves the abstract evaluation, the program and its
# derivative: a third of the time of a first call.
@eqx.filter_jit
def _run(algorithm: Algorithm, state: PyTree, k: int, stop: Any):
    return algorithm.run(state, k, stop)


def _implementation(algorithm, state, k, stop, blocks, slopes, x64):
    if x64 != jax.config.jax_enable_x64:  # pyright: ignore
        raise RuntimeError(
            "traceax: jax.enable_x64 was changed inside of a jitted function, which JAX "
            "compiles in the mode that it is called in; change it around the call, as in "
            "`with jax.enable_x64(True): jitted(x)`."
        )
    # Lowering says that there is no mesh where tracing says nothing, and the trace cache
    # takes the two for different.
    mesh = jax.sharding.use_abstract_mesh(jax.sharding.get_abstract_mesh())
    with mesh, SLOPES(slopes):
        outcome, stand_in = _run(algorithm, state, k, stop)
    return (outcome, stand_in) if blocks else outcome


def _abstract(*arguments):
    leaves, treedef = jtu.tree_flatten(arguments)
    for i, x in enumerate(leaves):
        if isinstance(x, jax.core.ShapedArray):
            leaves[i] = jax.ShapeDtypeStruct(
                x.shape,
                x.dtype,
                weak_type=x.weak_type,
                sharding=x.sharding,
                manual_axis_type=x.manual_axis_type,
            )

    def to_aval(x):
        return jax.typeof(x) if isinstance(x, jax.ShapeDtypeStruct) else x

    out = eqx.filter_eval_shape(_implementation, *treedef.unflatten(leaves))
    return jtu.tree_map(to_aval, out)


def _jvp(primals, tangents):
    # JAX differentiates a program in the mesh of its caller, which may have explicit axes.
    meshes = [
        jax.typeof(x).sharding.mesh
        for x in jtu.tree_leaves(eqx.filter(primals[1], eqx.is_array))
    ]
    here = jax.sharding.get_abstract_mesh()
    with jax.sharding.use_abstract_mesh(next((x for x in meshes if not x.empty), here)):
        return _derivative(primals, tangents)


def _derivative(primals, tangents):
    algorithm, state, k, stop, blocks, slopes, x64 = primals
    outcome, stand_in = eqxi.filter_primitive_bind(
        estimate_p, algorithm, state, k, stop, True, slopes, x64
    )

    def of_dtype(x, t):
        if t is None:
            return None
        return (t if jnp.iscomplexobj(x) else t.real).astype(x.dtype)

    def like(x, t):
        return None if t is None else jtu.tree_map(of_dtype, x, t)

    t_outcome = jtu.tree_map(lambda _: None, outcome)
    if slopes:
        if not isinstance(functional_of(state), Trace):
            refuse_slope()
        found = stand_in.slope(state, tangents[1])
        value, error, freedom = (None, None, None) if found is None else found
        space = space_of(state.operator)
        solvers = solver_tolerance(state.operator, space.real_dtype)
        if found is not None and solvers is not None:
            # No residual of the two solves in a slope is measured.
            share = jnp.inf if k >= space.size else 2 * solvers
            error = with_solvers(value, error, share)
        freedom = like(outcome.stats["degrees_of_freedom"], freedom)
        t_outcome = t_outcome._replace(
            standard_error=like(outcome.standard_error, error),
            stats={**t_outcome.stats, "degrees_of_freedom": freedom},
        )
    else:
        value = stand_in.derivative(state, tangents[1])
    t_outcome = t_outcome._replace(value=like(outcome.value, value))
    if not blocks:
        return outcome, t_outcome
    return (outcome, stand_in), (t_outcome, jtu.tree_map(lambda _: None, stand_in))


def _transpose(*args, **kwargs):
    # Unreachable: what the rule above returns is linear in the operator's tangent.
    raise NotImplementedError("estimate_trace is not linear in any argument.")


estimate_p = eqxi.create_vprim(
    "estimate_trace",
    eqxi.filter_primitive_def(_implementation),
    eqxi.filter_primitive_def(_abstract),
    eqxi.filter_primitive_jvp(_jvp),
    eqxi.filter_primitive_transpose(_transpose),
)
eqxi.register_impl_finalisation(estimate_p)


@jitted
def estimate(
    algorithm: Algorithm, state: PyTree, k: int, stop: Any = None, plain: bool = False
) -> Outcome:
    """The outcome of an algorithm, differentiable with respect to the state's operator.

    With `plain` JAX differentiates `run` itself, without the rule.

    Under a mesh of explicit axes the compiler finds layouts as under one of automatic
    axes, and what is returned is on every device.
    """
    # Only the state is differentiated.
    (of_algorithm, stop), static = eqx.partition((algorithm, stop), eqx.is_array)
    frozen = jax.lax.stop_gradient((of_algorithm, stop))
    algorithm, stop = eqx.combine(frozen, static)
    return _bind(algorithm, state, k, stop, plain)


@automatic
def _bind(algorithm: Algorithm, state: PyTree, k: int, stop: Any, plain: bool):
    slopes = SLOPES.value
    if plain and not slopes:
        return _run(algorithm, state, k, stop)[0]
    x64 = jax.config.jax_enable_x64  # pyright: ignore
    return eqxi.filter_primitive_bind(
        estimate_p, algorithm, state, k, stop, False, slopes, x64
    )


#
# Blocks
#


class Columns(StandIn):
    """Abstract base class of blocks V and Z, of which a chunk can be had at a time.

    **Attributes:**

    - `count`: how many of the `most` columns there are, the others being 0.
    """

    count: eqx.AbstractVar[int | Int[Array, ""]]
    most: eqx.AbstractVar[int]
    size: eqx.AbstractVar[int]

    @abc.abstractmethod
    def chunk(self, start: int | Int[Array, ""]) -> tuple[Array, Array]:
        """V and Z, of shape `(n, c)`, from column `start` on, `size` of them."""

    def product(
        self, operator: PyTree, V: Inexact[Array, "n c"]
    ) -> Inexact[Array, "n c"]:
        """What is differentiated, `A V`. Optional."""
        return apply_block(operator, V)

    def derivative(self, state, tangent):
        return self.pair(state.operator, tangent.operator, functional_of(state))

    def pair(
        self,
        operator: PyTree,
        tangent: PyTree,
        functional: Functional,
    ) -> Array | None:
        """`<Z, dA V>`, a chunk at a time: nothing of a chunk is kept for the next one."""
        if not jtu.tree_leaves(tangent):
            return None

        def pair_chunk(start):
            V, Z = jax.lax.stop_gradient(self.chunk(start))
            _, products = eqx.filter_jvp(
                lambda operator: self.product(operator, V), (operator,), (tangent,)
            )
            return None if products is None else functional.pair(Z, products)

        if self.size >= self.most:
            return pair_chunk(0)
        shape = jax.eval_shape(pair_chunk, jnp.int32(0))
        if shape is None:
            return None
        zero = jnp.zeros(shape.shape, shape.dtype)

        @jax.checkpoint
        def part(start):
            if isinstance(self.count, int):
                return pair_chunk(start)
            # Of all lanes: a condition that differs between them would be no condition.
            needed = eqxi.unvmap_any(start < self.count)
            return jax.lax.cond(needed, *alike(pair_chunk, lambda _: zero), start)

        starts = jnp.arange(0, self.most, self.size, dtype=jnp.int32)
        return fold(lambda total, start: total + part(start), zero, starts)


class Blocks(Columns):
    """Pairs of blocks `(V_i, Z_i)`, side by side.

    Columns beyond `count` of each are 0.
    """

    pairs: list[tuple[Inexact[Array, "n p"], Inexact[Array, "n p"]]]
    count: int | Int[Array, ""]
    most: int = eqx.field(static=True)
    size: int = eqx.field(static=True)

    def __init__(self, pairs, count: int | Int[Array, ""] | None = None):
        (n, self.most), self.pairs = pairs[0][0].shape, pairs
        self.count = self.most if count is None else count
        few = columns_at_once(n) // len(pairs)
        if count is not None:
            # So that a loop that stopped early pays for what it took.
            few = min(few, max(8, self.most // 8))
        self.size = min(max(few, 1), self.most)

    def chunk(self, start):
        def columns(block):
            if self.size >= self.most:
                return block
            # The last chunk is padded with zeros.
            rows = jnp.pad(block.T, ((0, -self.most % self.size), (0, 0)))
            return jax.lax.dynamic_slice_in_dim(rows, start, self.size).T

        V, Z = zip(*jtu.tree_map(columns, self.pairs), strict=True)
        return side_by_side(*V), side_by_side(*Z)


class Identity(Columns):
    """The blocks `V = Z = I`, of which no more than a chunk is ever in memory."""

    count: int | Int[Array, ""] = eqx.field(static=True)
    most: int = eqx.field(static=True)
    size: int = eqx.field(static=True)
    dtype: np.dtype = eqx.field(static=True)

    def __init__(self, operator: lx.AbstractLinearOperator):
        space = space_of(operator)
        self.count = self.most = space.size
        self.size = min(unit_columns(operator), space.size)
        self.dtype = space.compute_dtype

    def chunk(self, start):
        E = unit_vectors(start, self.most, self.size, self.dtype)
        return E, E

    def slope(self, state, tangent):
        if not jtu.tree_leaves(tangent.operator):
            return None
        functional, operator = functional_of(state), state.operator
        entries = diagonal_by_products(derived(operator, tangent.operator))
        sizes = space_of(operator).rounding * functional.sum(jnp.abs(entries))
        return tuple(exact_bar(functional.sum(entries), sizes))
