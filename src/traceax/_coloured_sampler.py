"""Probes on one colour at a time."""

import math
from typing import Any

import equinox as eqx
import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Bool, Int

from ._arguments import kind_of, require
from ._colours import Colours
from ._linalg.types import fold
from ._operators.block import Dense, apply_block, columns_at_once, parts_of
from ._samplers import RademacherSampler, Sampler

_WHERE = "ColouredSampler"
_SIGNS = RademacherSampler()


class ColouredSampler(Sampler):
    r"""Signs on one colour and zeros elsewhere, a colour after the other: probing.

    The vector `s_r` of round r is split over the p colours. With `P_c` for the projection
    on colour c, the sample of a round,

        sum_c s_r^* P_c A P_c s_r = s_r^* B s_r,    B = sum_c P_c A P_c,

    is Hutchinson's of B, of the same trace and diagonal. It is unbiased for any A, and
    exact, with signs, where A couples no two unknowns of one colour.

    *Use when* entries far apart are zero or small: sparse matrices, Jacobians of
    block-hollow networks, functions and inverses of stencils.

    | | |
    |---|---|
    | taken by | [`traceax.HutchinsonEstimator`][], traces and diagonals; [`traceax.LanczosQuadratureEstimator`][] |
    | budget k | a multiple of p; of Lanczos of p for each step |
    | beyond the products | O(n p) time a round, and the memory of a few vectors |
    | bias | none |
    | variance | of m rounds of signs, A real symmetric: `2 (|B|_F^2 - sum_i A_ii^2) / m` |
    | error bar | from rounds: unknown (NaN) of one that isn't exact, m - 1 degrees of freedom of m |

    Other estimators need probes that are isotropic each on its own, and refuse it.

    **Arguments:**

    - `colours`: an integer array of shape `(n,)`, colours from 0 to p - 1 all of which
        occur, in the flattened order of the operator's input; or [`traceax.Colours`][], of
        [`traceax.colour`][] or [`traceax.lattice_colours`][].
    - `exact`: whether the operator couples no two unknowns of one colour, so that the error
        bar is that of rounding, unless rounds differ. By default what `Colours` say, else
        `False`. Colours of A at distance 1 say nothing of its inverse, for which pass
        `exact=False`. Functions by Lanczos quadrature are never taken for exact.
    - `sampler`: of the `s_r`; [`traceax.RademacherSampler`][], which `exact` needs.
    - `num_colours`: p, an attribute.

    **Reference:** Tang and Saad, "A probing method for computing the diagonal of a matrix
    inverse", Numer. Linear Algebra Appl. 19 (2012), doi:10.1002/nla.779; Frommer, Rinelli
    and Schweitzer, "Analysis of Stochastic Probing Methods for Estimating the Trace of
    Functions of Sparse Symmetric Matrices", Math. Comp. 94 (2025), doi:10.1090/mcom/3984.
    """

    colours: Int[ArrayLike, " n"]
    exact: bool = eqx.field(static=True)
    sampler: Sampler
    num_colours: int = eqx.field(static=True)
    _of_pattern: bool = eqx.field(static=True)  # whether `Colours` said so

    def __init__(
        self,
        colours: Colours | Int[ArrayLike, " n"],
        exact: bool | None = None,
        sampler: Sampler = _SIGNS,
    ):
        known = isinstance(colours, Colours) and colours.exact
        self.colours = _checked(
            colours.labels if isinstance(colours, Colours) else colours
        )
        self.num_colours = int(self.colours.max()) + 1
        self.exact = known if exact is None else exact
        self._of_pattern = known and exact is None
        self.sampler = sampler
        what, hint = (
            "exact must be True, False or None",
            "it is a claim on the operator",
        )
        require(isinstance(self.exact, bool), _WHERE, what, exact, hint, TypeError)
        what = "sampler must be a traceax.Sampler of single probes"
        single = isinstance(sampler, Sampler) and sampler.round_size == 1
        hint = "pass an instance, such as traceax.NormalSampler()"
        require(single, _WHERE, what, sampler, hint, TypeError)
        signs = isinstance(sampler, RademacherSampler) or not self.exact
        what, hint = "exact traces take signs", "leave out sampler, or pass exact=False"
        require(signs, _WHERE, what, type(sampler).__name__, hint)

    rotation_invariant = False

    @property
    def independent(self) -> bool:  # pyright: ignore
        return self.sampler.independent

    @property
    def round_size(self) -> int:  # pyright: ignore
        return self.num_colours

    @property
    def _is_exact(self) -> bool:
        return self.exact

    def check(self, operator, where):
        what = "colours of a pattern are exact of operators of that pattern"
        hint = (
            "pass traceax.ColouredSampler(colours, exact=False), or exact=True if they "
            "separate what that couples"
        )
        got = "an inverse or a function of an operator"
        wrong = self._of_pattern and parts_of(operator, Dense)
        require(not wrong, where, what, got, hint)

    def sample(self, key, n, k, dtype):
        # Probe j is on colour `j mod p`, and `sqrt(p)` times as long as its part of s.
        self._check_length(n)
        p = self.num_colours
        rounds = self.sampler.sample(key, n, -(-k // p), dtype)
        parts = jnp.repeat(rounds.T, p, axis=0)[:k]
        return jnp.where(self._mask(0, k), math.sqrt(p) * parts, 0).T

    def _draw_range(self, key, start, width, most, space):
        self._check_length(space.size)
        return self.sampler._draw_range(key, start, width, most, space)

    def _drawn(self, key, most, space):
        drawn = self.sampler._drawn(key, most, space)
        return eqx.tree_at(lambda x: x.sampler, self, drawn)

    def _apply(self, operator, block):
        rows, p = block.T, self.num_colours
        m, n = rows.shape
        width = min(max(columns_at_once(n) // m, 1), p)

        def add(total, start, width: int):
            here = self._mask(start, width)[:, None, :]
            parts = jnp.where(here, rows[None], 0).reshape(width * m, n)
            products = apply_block(operator, parts.T).T.reshape(width, m, n)
            return total + jnp.sum(jnp.where(here, products, 0), axis=0)

        total, left = jnp.zeros_like(rows), p % width
        if width == p:
            return add(total, 0, p).T
        # Of all colours at once p blocks would be in memory, and in a derivative's.
        step = jax.checkpoint(lambda total, start: add(total, start, width))
        starts = jnp.arange(0, p - left, width, dtype=jnp.int32)
        total = fold(step, total, starts)
        return (add(total, p - left, left) if left else total).T

    def _rounds(self, probes, products):
        p, here = self.num_colours, self._mask(0, probes.shape[1])

        def of_rounds(block):
            parts = jnp.where(here, block.T, 0) / math.sqrt(p)
            return jnp.sum(parts.reshape(-1, p, parts.shape[1]), axis=1).T

        return of_rounds(probes), of_rounds(products)

    def _mask(self, start: int | Array, width: int) -> Bool[Array, "{width} n"]:
        """Which unknowns are of the colours of the probes `start, start + 1, ...`."""
        which = (jnp.arange(width, dtype=jnp.int32) + start) % self.num_colours
        return jnp.asarray(self.colours)[None, :] == which[:, None]

    def _check_length(self, n: int) -> None:
        what = f"colours must have an entry for each of the operator's {n} unknowns"
        hint = "they are in the flattened order of its input; of pairs pass size=n"
        right = np.shape(self.colours) == (n,)
        require(right, _WHERE, what, self.colours, hint)


def _checked(colours: Any) -> Int[np.ndarray, " n"]:
    what = "colours must be an array of integers known at trace time"
    hint = "make them outside of jax.jit, by traceax.colour for example"
    known = not isinstance(colours, jax.core.Tracer)
    require(known, _WHERE, what, "a traced array", hint, TypeError)
    index = np.asarray(colours)
    right = index.ndim == 1 and index.dtype.kind in "iu" and index.size > 0
    require(right, _WHERE, what, kind_of(colours), hint, TypeError)
    number = int(index.max()) + 1
    all_occur = index.min() >= 0 and (np.bincount(index) > 0).all()
    hint = "numpy.unique(colours, return_inverse=True)[1] renumbers them"
    missing = f"colours from {index.min()} to {number - 1}, not all of which do"
    what = "each colour from 0 to the largest must occur"
    require(all_occur, _WHERE, what, missing, hint)
    return index.astype(np.int32)
