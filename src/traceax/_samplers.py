"""Probe distributions: isotropic random vectors, `E[w w^*] = I`."""

import abc
import math
from collections.abc import Callable
from typing import ClassVar, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Complex, Float, Inexact, Int, Key, UInt32

from ._arguments import kind_of
from ._basis import growing_basis
from ._hash import normals, normals64, probe_streams, signs, words
from ._operator import Space, most_columns
from ._orthogonal import TILE, dots_and_norms
from ._sharding import on_one_cpu, place


class Sampler(eqx.Module):
    """Abstract base class of probe distributions.

    A sampler has no dtype and no size: probes take the operator's. Probe `j` must
    depend on the key and on the probes before it alone, so that a larger budget extends
    the sequence.

    **Attributes:**

    - `rotation_invariant`: whether the direction of a probe is uniform on the sphere,
        which resphering needs.
    - `independent`: whether probes are independent of each other, which leaving one
        out needs. `True` unless a subclass says otherwise.
    """

    rotation_invariant: ClassVar[bool]
    independent: ClassVar[bool] = True

    @abc.abstractmethod
    def sample(
        self, key: Key[Array, ""], n: int, k: int, dtype: np.dtype
    ) -> Inexact[Array, "n k"]:
        """Draws the first `k` probes.

        **Arguments:**

        - `key`: a typed key.
        - `n`: the length of a probe.
        - `k`: how many.
        - `dtype`: a real or complex dtype of at least 32-bit precision.

        **Returns:**

        An array of shape `(n, k)` and dtype `dtype`, a probe a column.
        """


class IndexedSampler(Sampler):
    """Abstract base class of samplers whose probe `j` depends on `(key, j)` alone.

    So any range of the sequence can be drawn, in chunks for example. A subclass defines
    `probes`, and has `sample` from here.
    """

    @abc.abstractmethod
    def probes(
        self,
        key: Key[Array, ""],
        start: int | Int[Array, ""],
        n: int,
        k: int,
        dtype: np.dtype,
    ) -> Inexact[Array, "n k"]:
        """Draws the probes `start, ..., start + k - 1`.

        **Arguments:** those of `sample`, and

        - `start`: the first, an integer that may be traced.
        """

    def sample(self, key, n, k, dtype):
        return self.probes(key, 0, n, k, dtype)


GENERATORS = ("hash", "jax.random")
# Entries of a probe that outweigh starting a loop.
_LONG = 2**16
# So many entries are drawn in less time than a loop takes to start.
_FEW = 2**10


class _Probes(NamedTuple):
    """Which probes to draw."""

    key: Key[Array, ""]
    start: int | Int[Array, ""]
    n: int
    k: int

    def streams(self, number: int) -> list[UInt32[Array, "k 3"]]:
        """Key words of so many streams for each probe."""
        data = jax.random.key_data(self.key)
        return probe_streams(data, self.start, self.k, number)

    def keys(self) -> Key[Array, " k"]:
        """A key for each probe."""
        return jax.vmap(lambda j: jax.random.fold_in(self.key, j))(self.indices())

    def indices(self) -> Int[Array, " k"]:
        start = jnp.asarray(self.start)
        return jnp.arange(self.k, dtype=start.dtype) + start


def _block(
    draw: Callable[[_Probes], Inexact[Array, "k n"]], probes: _Probes, *, at_once: bool
) -> Inexact[Array, "n k"]:
    short, few = probes.n < _LONG, probes.k * probes.n <= _FEW or probes.k == 1
    # What is multiplied in pieces is in memory before.
    in_pieces = at_once and not short and probes.k > most_columns(probes.n)
    if few or in_pieces or not on_one_cpu():
        return jax.lax.optimization_barrier(draw(probes)).T
    if short or at_once:
        return _once(draw(probes)).T
    # Long probes one after the other: intermediate results fit into the cache.
    rows = jax.lax.map(lambda j: draw(probes._replace(start=j, k=1)), probes.indices())
    return rows.reshape(-1, probes.n).T


def _once(rows: Inexact[Array, "k n"]) -> Inexact[Array, "k n"]:
    """The same rows, divided by ones that the compiler doesn't see to be ones: in spite
    of barriers it would draw them again wherever they are read; divisions it doesn't."""
    if jnp.iscomplexobj(rows):
        return jax.lax.complex(_once(rows.real), _once(rows.imag))
    one = jax.lax.full_like(rows, 1)
    return jax.lax.div(rows, jax.lax.select(jax.lax.eq(rows, rows), one, rows))


def _signs(generator: str, probes: _Probes, dtype) -> Inexact[Array, "k n"]:
    is_complex = jnp.issubdtype(dtype, jnp.complexfloating)
    n, real = probes.n, jnp.finfo(dtype).dtype
    if generator == "hash":
        parts = [signs(x, n, real) for x in probes.streams(1 + is_complex)]
    else:
        size = 2 * n if is_complex else n
        drawn = jax.vmap(lambda key: _signs_from_bits(key, size, real))(probes.keys())
        parts = [drawn[:, :n], drawn[:, n:]]
    return _complex(*parts) if is_complex else parts[0]


def _signs_from_bits(key: Key[Array, ""], n: int, dtype) -> Float[Array, " n"]:
    # 32 signs a random word.
    packed = jax.random.bits(key, (-(-n // 32),), jnp.uint32)
    bits = (packed[:, None] >> jnp.arange(32, dtype=jnp.uint32)[None, :]) & 1
    return 1 - 2 * bits.reshape(-1)[:n].astype(dtype)


def _normals(generator: str, probes: _Probes, dtype) -> Inexact[Array, "k n"]:
    if generator != "hash":
        draw = jax.vmap(lambda key: jax.random.normal(key, (probes.n,), dtype))
        return draw(probes.keys())
    is_complex = jnp.issubdtype(dtype, jnp.complexfloating)
    double = jnp.finfo(dtype).dtype == jnp.float64
    number = (1 + is_complex) * (1 + double)
    streams = [words(x, probes.n) for x in probes.streams(number)]
    if double:
        pairs = zip(streams[::2], streams[1::2], strict=True)
        parts = [normals64(high, low) for high, low in pairs]
    else:
        parts = [normals(x) for x in streams]
    return _complex(*parts) if is_complex else parts[0]


def _complex(
    real: Float[Array, "k n"], imaginary: Float[Array, "k n"]
) -> Complex[Array, "k n"]:
    half = math.sqrt(0.5)
    return jax.lax.complex(half * real, half * imaginary)


class _EntrywiseSampler(IndexedSampler):
    """Abstract base class of samplers whose entries come from a generator.

    - `generator`: one of `GENERATORS`.
    """

    # Whether hashed entries take no more than one pass over memory, in 32-bit precision.
    _single_pass: ClassVar[bool]
    generator: str = eqx.field(default="hash", static=True)

    def __check_init__(self):
        if not isinstance(self.generator, str) or self.generator not in GENERATORS:
            raise ValueError(
                f"{type(self).__name__}: generator must be one of {GENERATORS}, got "
                f"{self.generator!r}."
            )

    @abc.abstractmethod
    def rows(self, probes: _Probes, dtype: np.dtype) -> Inexact[Array, "k n"]:
        """The probes, each a row."""

    def probes(self, key, start, n, k, dtype):
        probes = _Probes(key, start, n, k)
        at_once = self._single_pass and self.generator == "hash"
        at_once = at_once and jnp.finfo(dtype).dtype != jnp.float64
        return _block(lambda probes: self.rows(probes, dtype), probes, at_once=at_once)


class RademacherSampler(_EntrywiseSampler):
    """Random signs, the lowest variance of independent entries.

    Entries are `+1` or `-1`; for a complex operator `(+-1 +- i) / sqrt(2)`, of modulus
    1. Not rotation invariant.

    **Arguments:**

    - `generator`: of random bits. `"hash"`, the default, hashes the key and the
        position of each entry, at the speed of memory. `"jax.random"` takes every bit
        from there.
    """

    rotation_invariant: ClassVar[bool] = False
    _single_pass: ClassVar[bool] = False

    def rows(self, probes, dtype):
        return _signs(self.generator, probes, dtype)


class NormalSampler(_EntrywiseSampler):
    """Standard normal entries; for a complex operator circular ones, `E|w|^2 = 1`.

    Rotation invariant.

    **Arguments:**

    - `generator`: as for [`traceax.RademacherSampler`][].
    """

    rotation_invariant: ClassVar[bool] = True
    _single_pass: ClassVar[bool] = True

    def rows(self, probes, dtype):
        return _normals(self.generator, probes, dtype)


class SphereSampler(_EntrywiseSampler):
    """Uniform on the real or complex sphere of radius `sqrt(n)`.

    A normal probe without the fluctuation of its length, which only adds variance.
    Rotation invariant.

    **Arguments:**

    - `generator`: as for [`traceax.RademacherSampler`][].
    """

    rotation_invariant: ClassVar[bool] = True
    _single_pass: ClassVar[bool] = True

    def rows(self, probes, dtype):
        rows = _normals(self.generator, probes, dtype)
        _, lengths = dots_and_norms(rows.T, rows.T, 1 if probes.n >= _LONG else TILE)
        return rows * (math.sqrt(probes.n) / lengths)[:, None].astype(dtype)


class OrthogonalSampler(Sampler):
    r"""Probes orthogonal to each other, of length `sqrt(n)`: columns of a Haar matrix.

    Each alone is uniform on the sphere, and k of them together miss no direction twice:
    the variance of Hutchinson's estimator falls by `1 - k / n`, to 0 for k = n. Worth
    its O(n k^2) time where k is not small against n. All probes are drawn at once,
    also by an estimator that takes products in chunks.

    Rotation invariant. Not independent: estimators that leave one probe out refuse it.
    Probe j depends on those before it, and a larger k extends the sequence.

    **Raises:**

    - `ValueError` for more than n probes.

    **Reference:** Yu, Suresh, Choromanski, Holtmann-Rice and Kumar, "Orthogonal Random
    Features", NeurIPS (2016), arXiv:1610.09072; Stewart, "The Efficient Generation of
    Random Orthogonal Matrices", SIAM J. Numer. Anal. 17 (1980), doi:10.1137/0717034.
    """

    rotation_invariant: ClassVar[bool] = True
    independent: ClassVar[bool] = False

    def sample(self, key, n, k, dtype):
        if k > n:
            raise ValueError(
                f"OrthogonalSampler.sample: at most n = {n} probes are orthogonal, "
                f"got k = {k}."
            )
        block = NormalSampler().sample(key, n, k, dtype)
        Q, R = growing_basis(block)
        # Haar needs a positive diagonal of R, which also makes Q a function of block.
        diagonal = jnp.diagonal(R)
        phase = diagonal / jnp.abs(diagonal).astype(dtype)
        scaled = Q * (math.sqrt(n) * phase)[None, :].astype(dtype)
        return jax.lax.optimization_barrier(scaled.T).T


class ShardedSampler(Sampler):
    """Probes laid out over a mesh of devices.

    ```python
    mesh = jax.make_mesh((4,), ("probes",))
    layout = jax.sharding.NamedSharding(mesh, jax.P(None, "probes"))
    traceax.HutchinsonEstimator(traceax.ShardedSampler(sharding=layout))
    ```

    gives each of four devices a quarter of the probes, and with the layout `P("rows",
    None)` a quarter of every probe. The numbers are those of `sampler`. Outside of
    `jax.jit` a mesh of explicit axes, which `jax.make_mesh` makes unless told otherwise,
    asks for `jax.set_mesh(mesh)`.

    **Arguments:**

    - `sampler`: whose probes are laid out; [`traceax.RademacherSampler`][] by default.
    - `sharding`: a `jax.sharding.NamedSharding` for arrays of shape `(n, k)`.
    """

    sampler: Sampler = RademacherSampler()
    sharding: jax.sharding.NamedSharding = eqx.field(kw_only=True, static=True)

    def __check_init__(self):
        if not isinstance(self.sampler, Sampler):
            raise TypeError(
                "ShardedSampler: sampler must be a traceax.Sampler, got "
                f"{kind_of(self.sampler)}; pass an instance."
            )
        if not isinstance(self.sharding, jax.sharding.NamedSharding):
            raise TypeError(
                "ShardedSampler: sharding must be a jax.sharding.NamedSharding, got "
                f"{kind_of(self.sharding)}; make one of a mesh and a partition "
                'spec for (n, k) blocks, such as jax.P(None, "probes").'
            )

    @property
    def rotation_invariant(self) -> bool:  # pyright: ignore
        return self.sampler.rotation_invariant

    @property
    def independent(self) -> bool:  # pyright: ignore
        return self.sampler.independent

    def sample(self, key, n, k, dtype):
        return place(self.sampler.sample(key, n, k, dtype), self.sharding)


def ranges_of(sampler: Sampler) -> Callable[..., Inexact[Array, "n k"]] | None:
    """`IndexedSampler.probes` of a sampler that has it, itself or below."""
    if isinstance(sampler, ShardedSampler):
        inner = ranges_of(sampler.sampler)
        if inner is None:
            return None
        return lambda *args: place(inner(*args), sampler.sharding)
    return sampler.probes if isinstance(sampler, IndexedSampler) else None


def laid_out(sampler: Sampler, space: Space) -> Sampler:
    """The sampler, of probes laid out as the operator's vectors are."""
    if space.layout is None or isinstance(sampler, ShardedSampler):
        return sampler
    return ShardedSampler(sampler, sharding=space.layout)


def draw_probes(
    sampler: Sampler, key: Key[Array, ""], k: int, space: Space
) -> Inexact[Array, "n {k}"]:
    """k probes for an operator, of its dtype and laid out as its vectors are."""
    return laid_out(sampler, space).sample(key, space.size, k, space.compute_dtype)


def check_sampler(
    sampler: Sampler, where: str, *, resphere: bool = False, independent: bool = False
) -> None:
    """Refuses probes that an estimator would be biased with.

    Resphering needs a uniform direction, leaving one probe out independent probes.
    """
    if not isinstance(sampler, Sampler):
        raise TypeError(
            f"{where}: sampler must be a traceax.Sampler, got "
            f"{kind_of(sampler)}; pass an instance, such as "
            "traceax.SphereSampler()."
        )
    if resphere and not sampler.rotation_invariant:
        raise ValueError(
            f"{where}: resphere=True needs a rotation-invariant sampler, got "
            f"{type(sampler).__name__}; use traceax.SphereSampler() or "
            "traceax.NormalSampler(), or pass resphere=False."
        )
    if independent and not sampler.independent:
        raise ValueError(
            f"{where}: leaving one probe out needs independent probes, got those of "
            f"{type(sampler).__name__}; use traceax.SphereSampler() or "
            "traceax.NormalSampler()."
        )
