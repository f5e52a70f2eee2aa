r"""Random words by hashing their position: a counter-based generator of 32-bit words.

Word i of a stream is a function of the stream's three key words `(a, b, c)` and of i
alone, so that any part of a block can be drawn anywhere: on another device, in another
chunk, or as a prefix of a longer block. It takes a tenth of threefry's time, which
would otherwise be that of a cheap operator's product.

    word_i = f(f(i ^ a) + b) ^ g(i + c)

f and g are bijections of 32-bit words that mix by multiplication and shifts (C.
Wellons, "Prospecting for Hash Functions" (2018), and the finaliser of A. Appleby's
MurmurHash3, both public domain). A bijection alone would draw without replacement,
which 2^32 entries would show: the sum of two that have independent keys doesn't (S.
Lucks, "The Sum of PRPs Is a Secure PRF", Eurocrypt (2000), doi:10.1007/3-540-45539-6_34,
shows it for random bijections).

The key words of a probe's streams are words themselves, of a stream that belongs to the
key: its key words are nine constants, each hashed with the words of the key. It is not for
cryptography.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key, UInt32

from ._sharding import on_one_cpu
from ._staging import inlined

# The first binary digits of pi behind the point, 32 a word.
_PI = (
    *(0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344, 0xA4093822),
    *(0x299F31D0, 0x082EFA98, 0xEC4E6C89, 0x452821E6),
)
# So many words are hashed for each bit in less time than another kernel takes to compile.
_FEW = 2**11
# The longest axis whose indices a 32-bit word holds.
_SEGMENT = 2**31


@inlined
def probe_streams(
    key_data: UInt32[Array, " w"], start: int | Int[Array, ""], k: int, number: int
) -> list[UInt32[Array, "k 3"]]:
    """Key words of so many streams for each of the probes `start, ..., start + k - 1`."""
    roots = _roots(key_data)
    first = jnp.asarray(start, jnp.uint32) * number
    drawn = words_at(roots, jax.lax.iota(jnp.uint32, k * number) + first, None)
    drawn = drawn.reshape(3, k, number)
    return [drawn[:, :, i].T for i in range(number)]


def split(key: Key[Array, ""], number: int) -> Key[Array, " {number}"]:
    """So many keys from one: others than those of `jax.random.split`, which take longer to
    compile."""
    data = jax.random.key_data(key)
    shape = (number, data.shape[0])
    # Words that no probe is drawn from.
    index = jax.lax.bitwise_not(jax.lax.iota(jnp.uint32, math.prod(shape)))
    fresh = words_at(_roots(data)[:1], index, None).reshape(shape)
    return jax.random.wrap_key_data(fresh, impl=jax.random.key_impl(key))


def _roots(key_data: UInt32[Array, " w"]) -> UInt32[Array, "3 3"]:
    roots = np.array(_PI, np.uint32).reshape(3, 3)
    for i in range(key_data.shape[0]):
        word = jax.lax.index_in_dim(key_data, i, keepdims=False)
        roots = _f(_add(_g(_xor(roots, word)), np.uint32(i)))
    return _hashed_once(jnp.asarray(roots))


def _hashed_once(words: UInt32[Array, "*s"]) -> UInt32[Array, "*s"]:
    """The same words, added to zeros: the compiler would else hash them again for each
    entry that is made of them."""
    zeros = ((0, 1, 0),) + ((0, 0, 0),) * words.ndim
    padded = jax.lax.pad(jax.lax.expand_dims(words, (0,)), np.uint32(0), zeros)
    return jax.lax.reduce_xor(padded, axes=(0,))


def words(
    key_words: UInt32[Array, "k 3"], n: int, start: int = 0
) -> UInt32[Array, "k n"]:
    """Words `start, ..., start + n - 1` of k streams."""
    if start + n <= 2 * _SEGMENT:
        low = jax.lax.iota(jnp.uint32, n) + jnp.uint32(start)
        return words_at(key_words, low, None)
    # An index of two words.
    first = start // _SEGMENT
    shape = (math.ceil((start + n) / _SEGMENT) - first, _SEGMENT)
    low = jax.lax.broadcasted_iota(jnp.uint32, shape, 1)
    high = jax.lax.broadcasted_iota(jnp.uint32, shape, 0) + jnp.uint32(first)
    begin = start - first * _SEGMENT
    low, high = (
        jax.lax.slice_in_dim(x.reshape(-1), begin, begin + n) for x in (low, high)
    )
    return words_at(key_words, low | (high << 31), high >> 1)


def words_at(
    key_words: UInt32[Array, "k 3"],
    low: UInt32[Array, " n"],
    high: UInt32[Array, " n"] | None,
) -> UInt32[Array, "k n"]:
    """Words of given indices, `low + 2^32 high`; `None` for 0."""
    a, b, c = (jax.lax.slice_in_dim(key_words, i, i + 1, axis=1) for i in range(3))
    low = jax.lax.expand_dims(low, (0,))
    if high is not None:
        # No change where the upper word is 0.
        high = jax.lax.expand_dims(_f(high), (0,))
        a, b, c = _xor(a, high), _add(b, _g(high)), _add(c, _f(high))
    return _xor(_f(_add(_f(_xor(low, a)), b)), _g(_add(low, c)))


# Operations of `jax.lax`: those of `jax.numpy` take five times as long to trace.
_xor, _add, _multiply = jax.lax.bitwise_xor, jax.lax.add, jax.lax.mul


def _f(x: UInt32[Array, "*s"]) -> UInt32[Array, "*s"]:
    x = _multiply(_shifted(x, 16), np.uint32(0x7FEB352D))
    x = _multiply(_shifted(x, 15), np.uint32(0x846CA68B))
    return _shifted(x, 16)


def _g(x: UInt32[Array, "*s"]) -> UInt32[Array, "*s"]:
    x = _multiply(_shifted(x, 16), np.uint32(0x85EBCA6B))
    x = _multiply(_shifted(x, 13), np.uint32(0xC2B2AE35))
    return _shifted(x, 16)


def _shifted(x: UInt32[Array, "*s"], by: int) -> UInt32[Array, "*s"]:
    return _xor(x, jax.lax.shift_right_logical(x, np.uint32(by)))


@inlined
def signs(key_words: UInt32[Array, "k 3"], n: int, dtype) -> Float[Array, "k n"]:
    """`n` signs of k streams: entry i by bit `i % 32` of word `i // 32`."""
    number = -(-n // 32)
    shifts = jax.lax.iota(jnp.uint32, 32)
    if on_one_cpu():
        drawn = words(key_words, number)
        if drawn.size > _FEW:
            drawn = _hashed_once(drawn)
        bits = drawn[:, :, None] >> shifts[None, None, :]
        bits = bits.reshape(len(key_words), 32 * number)[:, :n]
    else:
        # The same, entry by entry: devices that hold some entries draw those alone.
        entries = jax.lax.iota(jnp.uint32, n)
        bits = words_at(key_words, entries >> 5, None) >> (entries & 31)[None, :]
    one = jax.lax.full_like(bits, 1, dtype)
    return jax.lax.select(bits & 1 == 0, one, -one)


@inlined
def normals(word: UInt32[Array, "*s"]) -> Float[Array, "*s"]:
    """Standard normal numbers in 32-bit precision, symmetric about 0, at most 5.5.

    Of x uniform in (-1, 1) that with the distribution function `(1 + x) / 2`. With
    `w = -log(1 - x^2)` it is x times a smooth function of w (M. Giles, "Approximating
    the erfinv function", GPU Computing Gems (2011),
    doi:10.1016/B978-0-12-385963-1.00010-1). Relative error below 5e-7, a tenth of that of
    `jax.lax.erf_inv`; and all of it is multiplied and added, which compiles to one pass
    over memory, where a logarithm would be kept for its several uses.
    """
    # Odd multiples of 2^-24.
    x = jax.lax.shift_right_arithmetic(_signed(word), np.int32(8))
    x = _multiply(_add(x.astype(jnp.float32), np.float32(0.5)), np.float32(2.0**-23))
    # 1 - x^2 = 2^e m, with m from sqrt(1/2) to sqrt(2).
    size, one = jax.lax.abs(x), np.float32(1)
    square = _multiply(jax.lax.sub(one, size), _add(one, size))
    square = jax.lax.bitcast_convert_type(square, jnp.int32)
    e = jax.lax.sub(square, np.int32(0x3F3504F3))
    e = jax.lax.shift_right_arithmetic(e, np.int32(23))
    m = jax.lax.sub(square, jax.lax.shift_left(e, np.int32(23)))
    u = jax.lax.sub(jax.lax.bitcast_convert_type(m, jnp.float32), one)
    logarithm = _multiply(_polynomial(_LOGARITHM, u), u)
    powers = _multiply(e.astype(jnp.float32), np.float32(math.log(2)))
    w = _multiply(_add(logarithm, powers), np.float32(-1 / 8))
    return _multiply(x, _polynomial(_NORMAL, jax.lax.sub(w, one)))


# Least squares fits at 200 Chebyshev nodes, for the relative error, of log(1 + u) / u for
# 1 + u from sqrt(1/2) to sqrt(2), and of what is multiplied by x, as a function of w/8 - 1
# for all w that 24 bits allow.
_LOGARITHM = (
    *(0.99999994, -0.50000363, 0.33335114, -0.24970072),
    *(0.19898565, -0.17247013, 0.1623419, -0.10134057),
)
_NORMAL = (
    *(3.7638426, 1.9952515, -0.45756624, 0.17794226, -0.05157831),
    *(-0.023981923, 0.059592076, -0.055938583, 0.045815674, -0.043139752),
    *(0.0009352009, 0.05076633, -0.029435842, -0.012419378, 0.010189458),
)


def _polynomial(
    coefficients: tuple[float, ...], x: Float[Array, "*s"]
) -> Float[Array, "*s"]:
    total = jax.lax.full_like(x, coefficients[-1])
    for coefficient in coefficients[-2::-1]:
        total = _add(_multiply(total, x), np.float32(coefficient))
    return total


@inlined
def normals64(
    word: UInt32[Array, "*s"], low: UInt32[Array, "*s"]
) -> Float[Array, "*s"]:
    """Standard normal numbers in 64-bit precision, from two words each; at most 8.2."""
    leading = _signed(word).astype(jnp.float64) * 2.0**20
    centred = leading + ((low >> 12).astype(jnp.float64) + 0.5)
    return math.sqrt(2) * jax.lax.erf_inv(centred * 2.0**-51)


def _signed(word: UInt32[Array, "*s"]) -> Int[Array, "*s"]:
    return jax.lax.bitcast_convert_type(word, jnp.int32)
