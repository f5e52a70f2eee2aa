r"""The JAX primitive behind all estimates, and the derivative rule that they share.

An estimator returns its values with a `StandIn`, which carries their derivative. For a
trace, it holds two fixed blocks V and Z (n x p) with `E[V Z^*] = I`, and the derivative is

    d value = <Z, dA V> = sum_j z_j^* (dA v_j),    V and Z held fixed.

This derivative is unbiased: as `<Z, dA V> = tr(dA V Z^*)`, its expectation is the true
derivative `tr dA`. It is also linear in dA, so it is unbiased to every order: with the same
blocks, the second derivative `<Z, A''(t) V>` has expectation `tr A''(t)`. Stand-ins for
other quantities hold other blocks, and other linear functions of dA's products with these.

The rule never differentiates an estimator's algorithm. It runs the algorithm once, takes the
stand-in, and differentiates only "multiply the operator by V", which JAX can transpose. So
`compute` may use anything, such as factorisations and loops.

*Error bars of derivatives.* The samples behind an estimate are also linear in products with
fixed blocks. An outcome's `Evidence` holds these products. Their tangents are products with
dA. One function turns the products into the value's error bar, and their tangents into the
derivative's error bar.
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
    """Products, and a function of them, that determine the error bars of derivatives.

    - `products`: arrays linear in the operator, from its products with fixed blocks. We use
        only their tangents, which are products with dA.
    - `judge`: a fixed function; `judge(products)` returns an error bar for each value.
    - `solvers`: the relative error that iterative solvers inside the operator add to a
        derivative; `None` without such solvers.
    - `factor`: a number that multiplies the values after `judge`; `None` for 1.
    - `errors`: the values' standard errors before this factor; `None` without a factor.
    """

    products: PyTree[Any]
    judge: jtu.Partial
    solvers: Float[Array, ""] | None = None
    factor: Inexact[Array, ""] | None = None
    errors: PyTree[Float[Array, "..."]] = None

    def times(self, factor: Inexact[Array, ""], errors: PyTree[Array]) -> "Evidence":
        """The evidence for `factor` times an estimate with these standard errors."""
        if self.factor is not None:
            factor, errors = factor * self.factor.astype(factor.dtype), self.errors
        return dataclasses.replace(self, factor=factor, errors=errors)

    def slopes(self, values: list[Array], tangent: "Evidence") -> list[ErrorBar]:
        """Error bars for the derivatives `values`, from the evidence's `tangent`."""
        arrays = eqx.filter(self.products, eqx.is_inexact_array)

        def fill(t, x):
            return jnp.zeros_like(x) if t is None and x is not None else t

        tangents = tangent.products
        products = jtu.tree_map(fill, tangents, arrays, is_leaf=lambda x: x is None)
        errors, freedoms = [], []
        for x, (_, error, freedom) in zip(values, self.judge(products), strict=True):
            errors.append(error.reshape(x.shape))
            freedoms.append(jnp.broadcast_to(freedom, error.shape).reshape(x.shape))
        if self.factor is not None:
            errors = [jnp.abs(self.factor) * x for x in errors]
        if tangent.factor is not None:
            # The factor's derivative adds a term, whose error may correlate: we add both.
            added = [jnp.abs(tangent.factor) * x for x in jtu.tree_leaves(self.errors)]
            added = [jnp.where(tangent.factor == 0, 0, x) for x in added]
            errors = list(map(op.add, errors, added))
        if self.solvers is not None:
            solver = [jnp.where(x == 0, 0, self.solvers * jnp.abs(x)) for x in values]
            errors = list(map(jnp.hypot, errors, solver))
        return list(map(ErrorBar, values, errors, freedoms))


class Outcome(NamedTuple):
    """The output of an estimator.

    - `bars`: for a trace one error bar; for a diagonal or leaf traces one, with an axis; for
        a spectral function one for each leaf, and one for any quadratic forms. Unknown
        standard errors are infinite.
    - `results`: one for each leaf; quadratic forms share the first leaf's result.
    - `stats`: a dictionary with arrays.
    - `evidence`: for error bars of derivatives; `None` if they have none.
    - `kept`: buffers that a later estimate resumes from. With `()` no later estimate can
        resume. With `None` it computes everything again.
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
    """Casts an error bar. A NaN error, or a mean that isn't finite, gives error inf."""
    mean, error, freedom = map(jnp.asarray, bar)
    if not jnp.issubdtype(dtype, jnp.complexfloating):
        mean = jnp.real(mean)
    mean = mean.astype(dtype)
    error = jnp.real(error).astype(jnp.finfo(dtype).dtype)
    known = jnp.isfinite(mean) & ~jnp.isnan(error)
    return ErrorBar(mean, jnp.where(known, error, jnp.inf), freedom)


class Derivative(NamedTuple):
    """Derivatives of an outcome's values and its evidence; `None` stands for 0."""

    values: list[Array | None]
    products: PyTree[Any] = None


class StandIn(eqx.Module):
    """Abstract base class for the fixed blocks that determine a value's derivative."""

    @abc.abstractmethod
    def derivative(self, state: PyTree, tangent: PyTree) -> Derivative | None:
        """The derivative along `tangent`. In the result and in `tangent`, `None` means 0.

        We differentiate only a state's operator and, for a spectral function, the function
        and the right-hand sides. The result is linear in `tangent`, so JAX can transpose it.
        """


#
# The primitive
#


# JAX evaluates this abstractly, compiles it and differentiates it. With `jit` all share one
# trace, which saved a third of a first call. `stop` is a `Stop`, a `Depth` or `None`.
@eqx.filter_jit
def run(estimator: Any, state: PyTree, k: int, stop: PyTree) -> tuple[Outcome, StandIn]:
    return estimator.run(state, k, stop)


def _implementation(estimator, state, k, stop, with_stand_in, x64):
    if x64 != jax.config.jax_enable_x64:  # pyright: ignore
        raise RuntimeError(
            "traceax: jax.enable_x64 was changed inside a jitted function, which JAX "
            "compiles in the caller's mode; change it around the call, as in "
            "`with jax.enable_x64(True): jitted(x)`."
        )
    # Without a mesh, JAX lowers in an empty mesh but traces in none. Its trace cache treats
    # these as different, so we always set a mesh.
    with jax.sharding.use_abstract_mesh(jax.sharding.get_abstract_mesh()):
        outcome, stand_in = run(estimator, state, k, stop)
    return (outcome, stand_in) if with_stand_in else outcome


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
    # JAX calls this in the caller's mesh, so we switch to the mesh of the state's arrays.
    meshes = [
        jax.typeof(x).sharding.mesh
        for x in jtu.tree_leaves(eqx.filter(primals[1], eqx.is_array))
    ]
    mesh = jax.sharding.get_abstract_mesh()
    with jax.sharding.use_abstract_mesh(next((x for x in meshes if not x.empty), mesh)):
        return _derivative(primals, tangents)


def _derivative(primals, tangents):
    estimator, state, k, stop, with_stand_in, x64 = primals
    outcome, stand_in = eqxi.filter_primitive_bind(
        estimate_p, estimator, state, k, stop, True, x64
    )

    def cast(t, x):
        if t is None:
            return None
        return (t if jnp.iscomplexobj(x) else t.real).astype(x.dtype)

    def cast_tree(t, x):
        return jtu.tree_map(cast, t, x, is_leaf=lambda x: x is None)

    t_outcome = jtu.tree_map(lambda _: None, outcome)
    derivative = stand_in.derivative(state, tangents[1])
    if derivative is not None:
        pairs = zip(outcome.bars, t_outcome.bars, derivative.values, strict=True)
        bars = [t_x._replace(mean=cast_tree(value, x.mean)) for x, t_x, value in pairs]
        t_outcome = t_outcome._replace(bars=bars)
        if outcome.evidence is not None and derivative.products is not None:
            products = cast_tree(derivative.products, outcome.evidence.products)
            evidence = eqx.tree_at(
                lambda x: x.products,
                t_outcome.evidence,
                products,
                is_leaf=lambda x: x is None,
            )
            t_outcome = t_outcome._replace(evidence=evidence)
    if not with_stand_in:
        return outcome, t_outcome
    return (outcome, stand_in), (t_outcome, jtu.tree_map(lambda _: None, stand_in))


def _transpose(*args, **kwargs):
    # JAX never calls this: tangents pass through products, not through the primitive.
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
    """Abstract base class for blocks V and Z. We make them in chunks, to save memory.

    **Attributes:**

    - `most`, `size`: the number of columns, and the number of columns in a chunk.
    - `count`: the number of columns in use. Columns beyond it are 0.
    - `evidence`: its `products` are the output of `observe` for all columns, and either the
        first columns of `A V` as rows or `None`. We use only tangents, so arrays may be 0.
    """

    evidence: eqx.AbstractVar[Evidence | None]
    count: eqx.AbstractVar[int | Int[Array, ""]]
    most: eqx.AbstractVar[int]
    size: eqx.AbstractVar[int]

    @abc.abstractmethod
    def chunk(self, start: int | Int[Array, ""]) -> tuple[Array, Array]:
        """Columns `start` to `start + size` of V and Z."""

    @abc.abstractmethod
    def whole(self) -> tuple[Array, Array]:
        """All columns of V and Z."""

    def __iter__(self) -> Iterator[Array]:
        return iter(self.whole())

    def __getitem__(self, i: int) -> Array:
        return self.whole()[i]

    def product(
        self, operator: PyTree, V: Inexact[Array, "n c"]
    ) -> Inexact[Array, "n c"]:
        """The product `A V`, which the rule differentiates. Optional in subclasses."""
        return apply_block(operator, V)

    def observe(
        self, V: Inexact[Array, "n c"], W: Inexact[Array, "n c"]
    ) -> Inexact[Array, "... c"]:
        """The evidence from a chunk V and its products W. Optional in subclasses."""
        return column_dots(V, W)

    def joined(self, observed: Inexact[Array, "i ... c"]) -> Inexact[Array, "... p"]:
        """Joins evidence from chunks, without padding. Optional in subclasses."""
        return _join_chunks(observed)[..., : self.most]

    @property
    def _num_first(self) -> int:
        first = None if self.evidence is None else self.evidence.products[1]
        return 0 if first is None else len(first)

    def derivative(self, state, tangent):
        """`<Z, dA V>`, chunk by chunk, so that only one chunk is in memory."""
        num_first, contract = self._num_first, state.functional.pair

        def products(V):
            return product_tangent(state.operator, tangent.operator, V, self.product)

        @jax.checkpoint
        def chunk_terms(start):
            V, Z = jax.lax.stop_gradient(self.chunk(start))
            W = products(V)
            return () if W is None else (contract(Z, W), self.observe(V, W))

        if self.size >= self.most:
            V, Z = jax.lax.stop_gradient(self.chunk(0))
            W = products(V)
            if W is None:
                return None
            first = W.T[:num_first] if num_first else None
            return Derivative([contract(Z, W)], (self.observe(V, W), first))
        if not (shapes := jax.eval_shape(chunk_terms, jnp.int32(0))):
            return None

        @jax.checkpoint
        def used_terms(start):
            if isinstance(self.count, int):
                return chunk_terms(start)
            return if_any(start < self.count, chunk_terms, shapes, start)

        def step(value, start):
            term, observed = used_terms(start)
            return value + term, observed

        starts = jnp.arange(0, self.most, self.size, dtype=jnp.int32)
        zero = jnp.zeros(shapes[0].shape, shapes[0].dtype)
        value, observed = scan(step, zero, starts)
        V, first = self.chunk(0)[0], None
        if num_first and (W := products(V[:, :num_first])) is not None:
            first = W.T
        return Derivative([value], (self.joined(observed), first))


def _join_chunks(observed: Inexact[Array, "i ... c"]) -> Inexact[Array, "... ic"]:
    observed = jnp.moveaxis(observed, 0, -2)
    return observed.reshape(*observed.shape[:-2], -1)


class Blocks(Columns):
    """Pairs of blocks `(V_i, Z_i)`, side by side.

    In each block, columns beyond `count` are 0. If `evidence.products[0]` is a matrix,
    `observe` returns `V^* W` for products W, and otherwise the diagonal of `V^* W`.
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
        width = columns_at_once(n) // len(pairs)
        if not isinstance(self.count, int):
            # We use small chunks, so that we can skip unused ones after an early stop.
            width = min(width, max(8, self.most // 8))
        self.size = min(max(width, 1, self._num_first), self.most)

    def whole(self):
        V, Z = zip(*self.pairs, strict=True)
        return side_by_side(*V), side_by_side(*Z)

    def chunk(self, start):
        if self.size >= self.most:
            return self.whole()

        def columns(block):
            # We pad the last chunk with zeros.
            rows = jnp.pad(block.T, ((0, -self.most % self.size), (0, 0)))
            return jax.lax.dynamic_slice_in_dim(rows, start, self.size).T

        V, Z = zip(*jtu.tree_map(columns, self.pairs), strict=True)
        return side_by_side(*V), side_by_side(*Z)

    @property
    def _has_matrix(self) -> bool:
        return self.evidence is not None and self.evidence.products[0].ndim == 2

    def observe(self, V, W):
        if not self._has_matrix:
            return column_dots(V, W)
        return inner(self.whole()[0], W)

    def joined(self, observed):
        # A chunk has columns from each pair, so we join the pairs separately.
        parts = jnp.split(observed, len(self.pairs), axis=-1)
        return jnp.concatenate([_join_chunks(x)[..., : self.most] for x in parts], -1)


class Identity(Columns):
    """The blocks `V = Z = I`. Only one chunk is in memory at a time."""

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
