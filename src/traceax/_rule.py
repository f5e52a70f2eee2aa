r"""The primitive of all estimates, and the one derivative rule of the library.

An estimator returns, besides its values, a `StandIn`: blocks of vectors that stay fixed, and
a map that is linear in products with them. For a trace these are two blocks V and Z (n x p)
such that `V Z^*` is an unbiased stand-in for the identity, and the value has the derivative

    d value = <Z, dA V> = sum_j z_j^* (dA v_j),    V and Z held fixed.

The true derivative is `tr dA`, and `E[V Z^*] = I` makes the rule unbiased, to every order:
the rule is linear in dA, and the second derivative of `tr A(t)` is `tr A''(t)`, paired with
the same blocks.

The rule never binds the primitive on tangents. It binds it once on the primals, takes the
stand-in, and differentiates "apply the operator to the fixed block V", which JAX transposes.
So nothing differentiates through a factorisation or a loop of an estimator, and an estimator
may use anything inside `compute`.

*Error bars of derivatives.* The samples of an estimate are linear in the products, too. An
outcome carries these products as `Evidence`, in arrays whose tangents are the products with
dA. The function that makes the error bar of the value makes that of a derivative from them.
"""

import abc
import dataclasses
import operator as op
from collections.abc import Iterator
from typing import Any, NamedTuple

import equinox as eqx
import equinox.internal as eqxi
import jax
import jax.core
import jax.numpy as jnp
import jax.tree_util as jtu
import lineax as lx
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Inexact, Int, PyTree

from ._error_bar import ErrorBar
from ._linalg.dense import column_dots, inner, side_by_side
from ._linalg.types import if_any, scan
from ._operators.entries import unit_columns, unit_vectors
from ._operators.space import apply_block, columns_at_once, product_tangent, space_of
from ._results import RESULTS


class Evidence(eqx.Module):
    """The products that the error bar of a derivative is made of.

    - `products`: linear in the operator, with its products with fixed blocks. Only their
        tangents, the products with dA, are used.
    - `judge`: fixed. `judge(products)` returns the error bars that such products give, one for
        each value.
    - `solvers`: the relative error that solvers inside the operator leave in a derivative;
        `None` without such solvers.
    - `factor`, `errors`: the values of an estimate are `factor` times values that have these
        standard errors; `None` for a factor of 1.
    """

    products: PyTree[Any]
    judge: jtu.Partial
    solvers: Float[Array, ""] | None = None
    factor: Inexact[Array, ""] | None = None
    errors: PyTree[Float[Array, "..."]] = None

    def times(self, factor: Inexact[Array, ""], errors: PyTree[Array]) -> "Evidence":
        """The evidence of `factor` times an estimate that has these standard errors."""
        if self.factor is not None:
            factor, errors = factor * self.factor.astype(factor.dtype), self.errors
        return dataclasses.replace(self, factor=factor, errors=errors)

    def slopes(self, values: list[Array], tangent: "Evidence") -> list[ErrorBar]:
        """The error bars of derivatives that have these values."""
        arrays = eqx.filter(self.products, eqx.is_inexact_array)

        def dense(t, x):
            return jnp.zeros_like(x) if t is None and x is not None else t

        given = tangent.products
        products = jtu.tree_map(dense, given, arrays, is_leaf=lambda x: x is None)
        errors, freedoms = [], []
        for x, (_, error, freedom) in zip(values, self.judge(products), strict=True):
            errors.append(error.reshape(x.shape))
            freedoms.append(jnp.broadcast_to(freedom, error.shape).reshape(x.shape))
        if self.factor is not None:
            errors = [jnp.abs(self.factor) * x for x in errors]
        if tangent.factor is not None:
            # The two parts may be correlated in any way.
            more = [jnp.abs(tangent.factor) * x for x in jtu.tree_leaves(self.errors)]
            more = [jnp.where(tangent.factor == 0, 0, x) for x in more]
            errors = list(map(op.add, errors, more))
        if self.solvers is not None:
            parts = [jnp.where(x == 0, 0, self.solvers * jnp.abs(x)) for x in values]
            errors = list(map(jnp.hypot, errors, parts))
        return list(map(ErrorBar, values, errors, freedoms))


class Outcome(NamedTuple):
    """What an estimator returns.

    - `bars`: an error bar for every value: one for a trace, with leading axes for parts of a
        diagonal; one for each leaf of a function, and one for quadratic forms behind them.
        Unknown standard errors are infinite.
    - `results`: one for each value; quadratic forms share the first.
    - `stats`: a dictionary of arrays.
    - `evidence`: for error bars of derivatives; `None` if they have none.
    - `kept`: a `Grown` or its buffers, which a later estimate resumes from; `()` if none can,
        and `None` if a later one repeats this.
    """

    bars: list[ErrorBar]
    results: list[RESULTS]
    stats: dict[str, PyTree]
    evidence: Evidence | None = None
    kept: PyTree[Array] | None = None


def as_arrays(stats: dict[str, Any]) -> dict[str, PyTree[Array]]:
    def as_array(x):
        return jnp.asarray(x, jnp.int32) if isinstance(x, int) else jnp.asarray(x)

    return jtu.tree_map(as_array, stats)


def cast_bar(bar: ErrorBar, dtype: DTypeLike) -> ErrorBar:
    """The error bar in a dtype, the error infinite where it or the mean isn't known."""
    mean, error, freedom = map(jnp.asarray, bar)
    if not jnp.issubdtype(dtype, jnp.complexfloating):
        mean = jnp.real(mean)
    mean = mean.astype(dtype)
    error = jnp.real(error).astype(jnp.finfo(dtype).dtype)
    known = jnp.isfinite(mean) & ~jnp.isnan(error)
    return ErrorBar(mean, jnp.where(known, error, jnp.inf), freedom)


class Derivative(NamedTuple):
    """The derivatives of an outcome's values and of its evidence; `None` stands for 0."""

    values: list[Array | None]
    products: PyTree[Any] = None


class StandIn(eqx.Module):
    """Abstract base class of the blocks that a value's derivative is made of."""

    @abc.abstractmethod
    def derivative(self, state: PyTree, tangent: PyTree) -> Derivative | None:
        """The derivative; `None` stands for 0, there and among tangents.

        Only the operator of a state is differentiated, and for a spectral function the
        function and the right-hand sides. Linear in their tangents, for JAX to transpose.
        """


#
# The primitive
#


# Jitted, so that JAX's trace cache serves the abstract evaluation, the program and its
# derivative: a third of the time of a first call.
@eqx.filter_jit
def run(estimator: Any, state: PyTree, k: int, stop: PyTree) -> tuple[Outcome, StandIn]:
    return estimator.run(state, k, stop)


def _implementation(estimator, state, k, stop, blocks, x64):
    if x64 != jax.config.jax_enable_x64:  # pyright: ignore
        raise RuntimeError(
            "traceax: jax.enable_x64 was changed inside of a jitted function, which JAX "
            "compiles in the mode that it is called in; change it around the call, as in "
            "`with jax.enable_x64(True): jitted(x)`."
        )
    # Lowering says that there is no mesh where tracing says nothing, and the trace cache
    # takes the two for different.
    with jax.sharding.use_abstract_mesh(jax.sharding.get_abstract_mesh()):
        outcome, stand_in = run(estimator, state, k, stop)
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
    estimator, state, k, stop, blocks, x64 = primals
    outcome, stand_in = eqxi.filter_primitive_bind(
        estimate_p, estimator, state, k, stop, True, x64
    )

    def of_dtype(t, x):
        if t is None:
            return None
        return (t if jnp.iscomplexobj(x) else t.real).astype(x.dtype)

    def like(t, x):
        return jtu.tree_map(of_dtype, t, x, is_leaf=lambda x: x is None)

    t_outcome = jtu.tree_map(lambda _: None, outcome)
    found = stand_in.derivative(state, tangents[1])
    if found is not None:
        pairs = zip(outcome.bars, t_outcome.bars, found.values, strict=True)
        bars = [t_x._replace(mean=like(value, x.mean)) for x, t_x, value in pairs]
        t_outcome = t_outcome._replace(bars=bars)
        if outcome.evidence is not None and found.products is not None:
            products = like(found.products, outcome.evidence.products)
            evidence = eqx.tree_at(
                lambda x: x.products,
                t_outcome.evidence,
                products,
                is_leaf=lambda x: x is None,
            )
            t_outcome = t_outcome._replace(evidence=evidence)
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


def bind(estimator: eqx.Module, state: PyTree, k: int, stop: PyTree) -> Outcome:
    """The outcome of `estimator.run`, differentiable with respect to the state."""
    x64 = jax.config.jax_enable_x64  # pyright: ignore
    return eqxi.filter_primitive_bind(estimate_p, estimator, state, k, stop, False, x64)


#
# Blocks
#


class Columns(StandIn):
    """Abstract base class of blocks V and Z, of which a chunk can be had at a time.

    **Attributes:**

    - `count`: how many of the `most` columns there are, the others being 0.
    - `evidence`: its products are `(seen, first)`: what `observe` returns for all columns, and
        the first columns of `A V` as rows, or `None`. They are zeros: only their tangents,
        made of products with dA, are used.
    """

    evidence: eqx.AbstractVar[Evidence | None]
    count: eqx.AbstractVar[int | Int[Array, ""]]
    most: eqx.AbstractVar[int]
    size: eqx.AbstractVar[int]

    @abc.abstractmethod
    def chunk(self, start: int | Int[Array, ""]) -> tuple[Array, Array]:
        """V and Z, of shape `(n, c)`, from column `start` on, `size` of them."""

    @abc.abstractmethod
    def whole(self) -> tuple[Array, Array]:
        """V and Z, of shape `(n, p)`."""

    def __iter__(self) -> Iterator[Array]:
        return iter(self.whole())

    def __getitem__(self, i: int) -> Array:
        return self.whole()[i]

    def product(
        self, operator: PyTree, V: Inexact[Array, "n c"]
    ) -> Inexact[Array, "n c"]:
        """What is differentiated, `A V`. Optional."""
        return apply_block(operator, V)

    def observe(
        self, V: Inexact[Array, "n c"], W: Inexact[Array, "n c"]
    ) -> Inexact[Array, "... c"]:
        """The evidence in products W with a chunk. Optional."""
        return column_dots(V, W)

    def joined(self, seen: Inexact[Array, "i ... c"]) -> Inexact[Array, "... p"]:
        """The evidence in all chunks, without what is beyond the last column. Optional."""
        return _in_a_row(seen)[..., : self.most]

    @property
    def _num_first(self) -> int:
        first = None if self.evidence is None else self.evidence.products[1]
        return 0 if first is None else len(first)

    def derivative(self, state, tangent):
        """`<Z, dA V>`, a chunk at a time: nothing of a chunk is kept for the next one."""
        few, total = self._num_first, state.functional.pair

        def products(V):
            return product_tangent(state.operator, tangent.operator, V, self.product)

        @jax.checkpoint
        def pair(start):
            V, Z = jax.lax.stop_gradient(self.chunk(start))
            W = products(V)
            return () if W is None else (total(Z, W), self.observe(V, W))

        if self.size >= self.most:
            V, Z = jax.lax.stop_gradient(self.chunk(0))
            W = products(V)
            if W is None:
                return None
            first = W.T[:few] if few else None
            return Derivative([total(Z, W)], (self.observe(V, W), first))
        if not (shapes := jax.eval_shape(pair, jnp.int32(0))):
            return None

        @jax.checkpoint
        def part(start):
            if isinstance(self.count, int):
                return pair(start)
            return if_any(start < self.count, pair, shapes, start)

        def step(value, start):
            more, seen = part(start)
            return value + more, seen

        starts = jnp.arange(0, self.most, self.size, dtype=jnp.int32)
        zero = jnp.zeros(shapes[0].shape, shapes[0].dtype)
        value, seen = scan(step, zero, starts)
        V, first = self.chunk(0)[0], None
        if few and (W := products(V[:, :few])) is not None:
            first = W.T
        return Derivative([value], (self.joined(seen), first))


def _in_a_row(seen: Inexact[Array, "i ... c"]) -> Inexact[Array, "... ic"]:
    seen = jnp.moveaxis(seen, 0, -2)
    return seen.reshape(*seen.shape[:-2], -1)


class Blocks(Columns):
    """Pairs of blocks `(V_i, Z_i)`, side by side.

    Columns beyond `count` of each are 0. The evidence in their products W is the form
    `V^* W`, or its diagonal and the first columns of W.
    """

    pairs: list[tuple[Inexact[Array, "n p"], Inexact[Array, "n p"]]]
    evidence: Evidence | None
    count: int | Int[Array, ""]
    most: int = eqx.field(static=True)
    size: int = eqx.field(static=True)

    def __init__(
        self,
        pairs: list[tuple[Inexact[Array, "n p"], Inexact[Array, "n p"]]],
        evidence: Evidence | None = None,
        count: int | Int[Array, ""] | None = None,
    ):
        (n, self.most), self.pairs, self.evidence = pairs[0][0].shape, pairs, evidence
        self.count = self.most if count is None else count
        few = columns_at_once(n) // len(pairs)
        if not isinstance(self.count, int):
            # So that a loop that stopped early pays for what it took.
            few = min(few, max(8, self.most // 8))
        self.size = min(max(few, 1, self._num_first), self.most)

    def whole(self):
        V, Z = zip(*self.pairs, strict=True)
        return side_by_side(*V), side_by_side(*Z)

    def chunk(self, start):
        if self.size >= self.most:
            return self.whole()

        def columns(block):
            # The last chunk is padded with zeros.
            rows = jnp.pad(block.T, ((0, -self.most % self.size), (0, 0)))
            return jax.lax.dynamic_slice_in_dim(rows, start, self.size).T

        V, Z = zip(*jtu.tree_map(columns, self.pairs), strict=True)
        return side_by_side(*V), side_by_side(*Z)

    @property
    def _is_form(self) -> bool:
        return self.evidence is not None and self.evidence.products[0].ndim == 2

    def observe(self, V, W):
        if not self._is_form:
            return column_dots(V, W)
        return inner(self.whole()[0], W)

    def joined(self, seen):
        # A chunk holds columns of each pair.
        parts = jnp.split(seen, len(self.pairs), axis=-1)
        return jnp.concatenate([_in_a_row(x)[..., : self.most] for x in parts], -1)


class Identity(Columns):
    """The blocks `V = Z = I`, of which no more than a chunk is ever in memory."""

    evidence: Evidence | None
    count: int | Int[Array, ""] = eqx.field(static=True)
    most: int = eqx.field(static=True)
    size: int = eqx.field(static=True)
    dtype: np.dtype = eqx.field(static=True)

    def __init__(self, operator: lx.AbstractLinearOperator, evidence: Evidence | None):
        space = space_of(operator)
        self.count = self.most = space.size
        self.size = min(unit_columns(operator), space.size)
        self.dtype, self.evidence = space.compute_dtype, evidence

    def whole(self):
        E = jnp.eye(self.most, dtype=self.dtype)
        return E, E

    def chunk(self, start):
        E = unit_vectors(start, self.most, self.size, self.dtype)
        return E, E
