"""f(A) as a linear operator."""

from collections.abc import Callable

import equinox as eqx
import jax
import jax.flatten_util as jfu
import jax.numpy as jnp
import jax.tree_util as jtu
import lineax as lx
from jaxtyping import Array, ArrayLike, Float

from .._arguments import without_numpy
from .._linalg.types import automatic
from .._operators import block
from .._operators.block import apply_block, as_data, is_known, space_of
from .._operators.check import ComplexLinearOperator, checked_operator
from .frechet import function_product
from .function import SpectralFunction, checked_lower, spectral_function


class MatrixFunctionLinearOperator(block.Dense):
    r"""The operator `f(A)` of a symmetric or Hermitian A, applied by Lanczos.

    ```python
    square_root = traceax.MatrixFunctionLinearOperator(operator, jnp.sqrt, 30)
    traceax.trace(key, square_root, 40)
    ```

    A product takes s products with A, O(n s^2) time and s vectors of memory. It is
    exact for polynomials of degree below s, and for a space that stops growing.
    Differentiable once with respect to A and to what `fn` closes over, to any order to
    the vector.

    **Arguments:**

    - `operator`: a square lineax operator, over arrays or PyTrees, that is tagged
        symmetric (real) or semidefinite (real or complex).
    - `fn`: a function of a real scalar. If it is complex, such as `exp(i t)`, f(A) acts on
        complex vectors, and a product with it takes 2 s products with a real A.
    - `num_steps`: s, a positive int; more than n are not used.
    - `tags`: what is known of f(A), such as `lineax.positive_semidefinite_tag`.
    - `lower`: a real scalar that no eigenvalue of A is below, where one is known, so that
        rounding takes none out of the domain of `fn`; 0 of an operator that is tagged
        positive semidefinite.

    **Raises:** as [`traceax.trace_function`][]; `ValueError` for an operator that isn't
    known to be Hermitian.
    """

    operator: lx.AbstractLinearOperator
    fn: SpectralFunction
    num_steps: int = eqx.field(static=True)
    tags: frozenset[object] = eqx.field(static=True)
    lower: Float[Array, ""] | None

    def __init__(
        self,
        operator: lx.AbstractLinearOperator,
        fn: Callable,
        num_steps: int,
        tags: object = (),
        *,
        lower: ArrayLike | None = None,
    ):
        where = "traceax.MatrixFunctionLinearOperator"
        operator = checked_operator(operator, where, "(operator, fn, num_steps)")
        space = space_of(operator)
        if not block.is_hermitian(operator):
            raise ValueError(
                f"{where}: operator must be known to be Hermitian, got one without a "
                "tag of that; give it lineax.symmetric_tag (if it is real) or "
                "lineax.positive_semidefinite_tag."
            )
        num_steps = without_numpy(num_steps)
        if type(num_steps) is not int or num_steps < 1:
            kind = ValueError if type(num_steps) is int else TypeError
            raise kind(f"{where}: num_steps must be a positive int, got {num_steps!r}.")
        self.operator = as_data(operator)
        self.fn = spectral_function(fn, space.real_dtype, where)
        values = jax.eval_shape(self.fn, jnp.ones((), space.real_dtype))
        if len(values) != 1:
            raise ValueError(f"{where}: fn must return one scalar, not several.")
        is_complex = jnp.issubdtype(values[0].dtype, jnp.complexfloating)
        if is_complex and not space.is_complex:
            # The wrapped operator has lost its tag.
            known = lower is None and block.is_positive_semidefinite(operator)
            lower = 0.0 if known else lower
            self.operator = ComplexLinearOperator(self.operator)
        self.num_steps = min(num_steps, space.size)
        several = isinstance(tags, set | frozenset | tuple | list)
        self.tags = frozenset(tags if several else (tags,))
        lower = checked_lower(lower, space.real_dtype, where)
        self.lower = jax.lax.stop_gradient(lower)

    @automatic
    def mv(self, vector):
        space = space_of(self.operator)
        if space.is_complex:
            vector = jtu.tree_map(
                lambda x, like: x.astype(like.dtype), vector, space.structure
            )
        flat, unravel = jfu.ravel_pytree(vector)
        if jnp.iscomplexobj(flat) and not space.is_complex:
            return ComplexLinearOperator(self).mv(vector)
        x = flat.astype(space.compute_dtype)
        y = function_product(self.operator, self.fn, x, self.num_steps, self.lower)
        return unravel(y.astype(flat.dtype))

    def as_matrix(self):
        space = space_of(self.operator)
        identity = jnp.eye(space.size, dtype=space.compute_dtype)
        return apply_block(self, identity).astype(space.dtype)

    def transpose(self):
        if not space_of(self.operator).is_complex:
            return self
        return eqx.tree_at(lambda x: x.operator, self, lx.conj(self.operator))

    def in_structure(self):
        return self.operator.in_structure()

    def out_structure(self):
        return self.operator.out_structure()

    def _knows(self, check):
        # A function keeps the structure, and has the sign that it is tagged with.
        own, *_ = block.TAGS[check]
        kept = check in (lx.is_symmetric, lx.is_diagonal)
        return own in self.tags or (kept and is_known(self.operator, check))
