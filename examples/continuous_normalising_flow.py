"""Continuous normalising flows whose log-density is a trace along a path.

A flow moves a point `x` from the data at `t = 0` to a normal distribution at `t = 1`
along `dx/dt = f(t, x)`. Its log-density is that of the end point plus the integral of
the divergence `tr J`, where `J` is the Jacobian of `f`. Training takes `tr J` and a
regulariser, `|J|_F^2 = tr(J^T J)`, from `traceax.trace` inside the ODE solver. Probes
are drawn from a key that is fixed along a path, and new for every point and update.

Flows are trained on two moons in the plane, from one product with `J` per evaluation of
`f`, and on 16 principal components of scikit-learn's handwritten digits, from four.
Their held-out log-likelihoods are then compared with those of the exact divergence.

    python examples/continuous_normalising_flow.py [figure.png]
"""

import sys
from collections.abc import Callable
from typing import NamedTuple

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
import matplotlib as mpl
import numpy as np
import optax
from jax.scipy.stats import norm
from jaxtyping import Array, ArrayLike, Float, Key
from sklearn.datasets import load_digits, make_moons
from sklearn.decomposition import PCA
from sklearn.mixture import GaussianMixture
from sklearn.model_selection import train_test_split
from sklearn.neighbors import KernelDensity

import traceax as tx

mpl.use("Agg")
import matplotlib.pyplot as plt

Scalar = Float[Array, ""]
Rates = Callable[[Scalar, Float[Array, " n"]], tuple[Scalar, Scalar]]

TRAINING_STEPS = 6  # of the ODE solver
EVALUATION_STEPS = 24
NUM_KEYS = 8  # sets of probes that error bars of averages are taken over


#
# The flow
#


class VectorField(eqx.Module):
    """`f(t, x)`, a small network."""

    network: eqx.nn.MLP

    def __init__(self, dimension: int, activation: Callable, key: Key[Array, ""]):
        self.network = eqx.nn.MLP(dimension + 1, dimension, 64, 2, activation, key=key)

    def __call__(self, t: ArrayLike, x: Float[Array, " n"]) -> Float[Array, " n"]:
        return self.network(jnp.append(x, t))


# --8<-- [start:divergence]
def jacobian(
    field: VectorField, t: Scalar, x: Float[Array, " n"]
) -> lx.JacobianLinearOperator:
    return lx.JacobianLinearOperator(lambda x, _: field(t, x), x)


def divergence(
    field: VectorField, t: Scalar, x: Float[Array, " n"], key: Key[Array, ""], k: int
) -> tx.Estimate:
    """`tr J` from k products with J; exact for `k >= n`."""
    # throw=False: no callback to the host in the solver's loop.
    return tx.trace(
        key, jacobian(field, t, x), k, tx.HutchinsonEstimator(), throw=False
    )


# --8<-- [end:divergence]


# --8<-- [start:regulariser]
def gram(jacobian: lx.AbstractLinearOperator) -> lx.AbstractLinearOperator:
    """`J^T J`, whose trace is the squared Frobenius norm of J."""
    return lx.TaggedLinearOperator(jacobian.T @ jacobian, lx.positive_semidefinite_tag)


def squared_norm(
    field: VectorField, t: Scalar, x: Float[Array, " n"], key: Key[Array, ""], k: int
) -> tx.Estimate:
    """`|J|_F^2` from k products with J and k with `J^T`; exact for `k >= n`."""
    operator = gram(jacobian(field, t, x))
    return tx.trace(key, operator, k, tx.HutchinsonEstimator(), throw=False)


# --8<-- [end:regulariser]


# --8<-- [start:path]
def integrate(
    field: VectorField, x: Float[Array, " n"], rates: Rates, num_steps: int
) -> tuple[Float[Array, " n"], tuple[Scalar, Scalar]]:
    """Moves x to the base, and integrates two rates along its path."""

    def derivative(t, state, args):
        x, _ = state
        return field(t, x), rates(t, x)

    solution = diffrax.diffeqsolve(
        diffrax.ODETerm(derivative),
        diffrax.Heun(),
        t0=0.0,
        t1=1.0,
        dt0=1 / num_steps,
        y0=(x, (jnp.zeros(()), jnp.zeros(()))),
        adjoint=diffrax.RecursiveCheckpointAdjoint(checkpoints=num_steps),
        max_steps=num_steps,
    )
    return jax.tree.map(lambda saved: saved[-1], solution.ys)


def log_density(
    field: VectorField,
    x: Float[Array, " n"],
    key: Key[Array, ""],
    ks: tuple[int, int],
    num_steps: int,
) -> tuple[Scalar, Scalar]:
    """The log-density of x, and the integral of `|J|_F^2` along its path.

    From ks[0] products with J and ks[1] with `J^T J` at every stage of the solver. They
    use the same probes at every stage: the integrand is a smooth function of time.
    """
    keys = jax.random.split(key)

    def rates(t, x):
        return (
            divergence(field, t, x, keys[0], ks[0]).value,
            squared_norm(field, t, x, keys[1], ks[1]).value,
        )

    end, (log_volume, penalty) = integrate(field, x, rates, num_steps)
    return jnp.sum(norm.logpdf(end)) + log_volume, penalty


# --8<-- [end:path]


# --8<-- [start:error_bar]
def log_density_with_interval(
    field: VectorField, x: Float[Array, " n"], key: Key[Array, ""], k: int
) -> tuple[Scalar, Scalar]:
    """The log-density of x, and the half-width of its 95 % interval.

    The errors at two times are not independent, as the probes are the same. But the
    standard deviation of an integral, of a sample's too, is at most the integral of the
    standard deviations: the interval is safe, if wide.
    """

    def rates(t, x):
        estimate = divergence(field, t, x, key, k)
        low, high = estimate.confidence_interval()
        return estimate.value, (high - low) / 2

    end, (log_volume, half) = integrate(field, x, rates, EVALUATION_STEPS)
    return jnp.sum(norm.logpdf(end)) + log_volume, half


# --8<-- [end:error_bar]


def trajectory(
    field: VectorField,
    x: Float[Array, " n"],
    times: Float[Array, " m"],
) -> Float[Array, "m n"]:
    """The path of x from `times[0]`, forwards or backwards in time."""
    solution = diffrax.diffeqsolve(
        diffrax.ODETerm(lambda t, x, args: field(t, x)),
        diffrax.Heun(),
        t0=times[0],
        t1=times[-1],
        dt0=(times[-1] - times[0]) / EVALUATION_STEPS,
        y0=x,
        saveat=diffrax.SaveAt(ts=times),
        max_steps=EVALUATION_STEPS + 1,
    )
    return jnp.asarray(solution.ys)


@eqx.filter_jit
def sample(field: VectorField, ends: Float[Array, "b n"]) -> Float[Array, "b n"]:
    """Points of the data's distribution from points of the base's."""
    backwards = jnp.array([1.0, 0.0])
    return jax.vmap(lambda end: trajectory(field, end, backwards)[-1])(ends)


#
# Training
#


class Settings(NamedTuple):
    """How a flow is trained. `ks` are the products with J and with `J^T J`."""

    activation: Callable
    ks: tuple[int, int]
    num_updates: int
    optimiser: optax.GradientTransformation
    batch_size: int = 128


def settings(activation: Callable, ks: tuple[int, int], num_updates: int) -> Settings:
    schedule = optax.cosine_decay_schedule(2e-2, num_updates)
    return Settings(activation, ks, num_updates, optax.adam(schedule))


# --8<-- [start:objective]
def objective(
    field: VectorField,
    xs: Float[Array, "b n"],
    key: Key[Array, ""],
    ks: tuple[int, int],
    weight: Scalar,
) -> Scalar:
    """The mean of `-log p(x)`, plus the weighted regulariser."""
    keys = jax.random.split(key, len(xs))
    log_p, penalty = jax.vmap(
        lambda x, key: log_density(field, x, key, ks, TRAINING_STEPS)
    )(xs, keys)
    return jnp.mean(weight * penalty - log_p)


# --8<-- [end:objective]


@eqx.filter_jit
def update(
    progress: tuple[VectorField, optax.OptState],
    data: Float[Array, "N n"],
    key: Key[Array, ""],
    settings: Settings,
    weight: Scalar,
) -> tuple[VectorField, optax.OptState]:
    """One step of the optimiser, with a new batch and new probes."""
    field, state = progress
    batch_key, probe_key = jax.random.split(key)
    xs = jax.random.choice(batch_key, data, (settings.batch_size,))
    gradient = eqx.filter_grad(objective)(field, xs, probe_key, settings.ks, weight)
    change, state = settings.optimiser.update(gradient, state)
    return eqx.apply_updates(field, change), state


def train(
    data: Float[np.ndarray, "N n"],
    key: Key[Array, ""],
    settings: Settings,
    weight: float,
) -> VectorField:
    init_key, key = jax.random.split(key)
    field = VectorField(data.shape[1], settings.activation, init_key)
    progress = field, settings.optimiser.init(eqx.filter(field, eqx.is_inexact_array))
    points = jnp.asarray(data)
    for step in range(settings.num_updates):
        step_key = jax.random.fold_in(key, step)
        # The weight as an array: a new one is no reason to compile again.
        progress = update(progress, points, step_key, settings, jnp.asarray(weight))
    return progress[0]


#
# Comparison with the exact divergence
#


class Evaluation(NamedTuple):
    """Log-densities and regularisers, and the products used per stage for each."""

    values: tuple[Float[Array, "keys b"], Float[Array, "keys b"]]
    num_matvecs: tuple[Array, Array]


@eqx.filter_jit
def evaluate(
    field: VectorField,
    xs: Float[Array, "b n"],
    keys: Key[Array, " keys"],
    ks: tuple[int, int],
) -> Evaluation:
    """The log-densities of xs and their regularisers, once for every key."""

    def outcome(key):
        return jax.vmap(
            lambda x, key: log_density(field, x, key, ks, EVALUATION_STEPS)
        )(xs, jax.random.split(key, len(xs)))

    start = (field, jnp.zeros(()), xs[0], keys[0])
    estimates = divergence(*start, ks[0]), squared_norm(*start, ks[1])
    used = [estimate.stats["num_matvecs"] for estimate in estimates]
    return Evaluation(jax.lax.map(outcome, keys), (used[0], used[1]))


def compare(
    field: VectorField,
    xs: Float[Array, "b n"],
    key: Key[Array, ""],
    ks: tuple[int, int],
) -> None:
    """Prints held-out averages: estimated over sets of probes, and exact."""
    dimension = xs.shape[1]
    keys = jax.random.split(key, NUM_KEYS)
    estimated = evaluate(field, xs, keys, ks)
    exact = evaluate(field, xs, keys[:1], (dimension, dimension))
    print(f"  {'held-out mean':16}{'estimate':>10}{'+-':>9}{'exact':>10}   products")
    for i, name in enumerate(("log-density", "int |J|_F^2 dt")):
        values, exact_mean = estimated.values[i], exact.values[i].mean()
        # Of the probes alone: the points are the same for all keys.
        variance = jnp.mean(jnp.var(values, axis=0, ddof=1))
        error = jnp.sqrt(variance / values.size)
        print(
            f"  {name:16}{values.mean():10.4f}{error:9.4f}{exact_mean:10.4f}"
            f"   {estimated.num_matvecs[i]} against {exact.num_matvecs[i]}"
        )


class Points(NamedTuple):
    """Log-densities of single points."""

    estimate: Float[Array, " b"]
    half_width: Float[Array, " b"]
    exact: Float[Array, " b"]


@eqx.filter_jit
def point_by_point(
    field: VectorField, xs: Float[Array, "b n"], key: Key[Array, ""], k: int
) -> Points:
    def point(x, key):
        estimate, half = log_density_with_interval(field, x, key, k)
        exact, _ = log_density_with_interval(field, x, key, len(x))
        return Points(estimate, half, exact)

    return jax.vmap(point)(xs, jax.random.split(key, len(xs)))


class Stage(NamedTuple):
    """Traces at one point of a path, with the exact values from the full Jacobian."""

    trace: tx.Estimate
    norm: tx.Estimate
    exact_trace: Scalar
    exact_norm: Scalar


@eqx.filter_jit
def stages(
    field: VectorField,
    x: Float[Array, " n"],
    times: Float[Array, " m"],
    keys: Key[Array, " m"],
    k: int,
) -> Stage:
    """Traces along the path of x, at every time with the probes of its key."""

    def stage(t, x, key):
        operator = gram(jacobian(field, t, x))
        matrix = jax.jacfwd(lambda x: field(t, x))(x)
        return Stage(
            divergence(field, t, x, key, k),
            tx.trace(key, operator, k, throw=False),
            jnp.trace(matrix),
            jnp.sum(matrix**2),
        )

    return jax.vmap(stage)(times, trajectory(field, x, times), keys)


def print_stages(times: Float[Array, " m"], path: Stage, rows: list[int]) -> None:
    print(f"  {'t':4}{'tr J':>18}{'exact':>8}{'|J|_F^2':>18}{'exact':>8}")
    for i in rows:
        trace, squared = (
            f"{estimate.value[i]:.2f} +- {estimate.standard_error[i]:.2f}"
            for estimate in (path.trace, path.norm)
        )
        print(
            f"  {times[i]:4.2f}{trace:>18}{path.exact_trace[i]:8.2f}"
            f"{squared:>18}{path.exact_norm[i]:8.2f}"
        )
    first = jax.tree.map(lambda leaf: leaf[0], path)
    for name, estimate in (("tr J", first.trace), ("|J|_F^2", first.norm)):
        reason = tx.CHOICES[estimate.stats["choice"]]
        print(f"  {name}: {estimate.stats['num_matvecs']} products. {reason}")


#
# Data
#

MOONS_SCALE = 0.6
MOONS_NOISE = 0.1
NUM_COMPONENTS = 16


def moons(
    size: int, seed: int, noise: float = MOONS_NOISE
) -> Float[np.ndarray, "size 2"]:
    """Two noisy arcs, moved to the origin and scaled."""
    points, _ = make_moons(size, noise=noise, random_state=seed)
    return ((points - np.array([0.5, 0.25])) / MOONS_SCALE).astype(np.float32)


def moons_log_likelihood(test: Float[np.ndarray, "M 2"]) -> float:
    """Under the true density: a normal distribution about every point of the arcs."""
    density = KernelDensity(bandwidth=MOONS_NOISE / MOONS_SCALE)
    return density.fit(moons(2000, seed=0, noise=0.0)).score(test) / len(test)


class Digits(NamedTuple):
    train: Float[np.ndarray, "N n"]
    test: Float[np.ndarray, "M n"]
    pca: PCA


def digits() -> Digits:
    """Whitened principal components, fitted to the training images."""
    images, _ = load_digits(return_X_y=True)
    train_images, test_images = train_test_split(images, test_size=0.2, random_state=0)
    pca = PCA(NUM_COMPONENTS, whiten=True, random_state=0).fit(train_images)
    train, test = (
        pca.transform(images).astype(np.float32)
        for images in (train_images, test_images)
    )
    return Digits(train, test, pca)


def normal_log_likelihood(
    train: Float[np.ndarray, "N n"], test: Float[np.ndarray, "M n"]
) -> float:
    """Under a normal distribution fitted to the training points."""
    return GaussianMixture(1).fit(train).score(test)


#
# Figure
#


def draw_moons(axes, field: VectorField, test: Float[Array, "b 2"], key) -> None:
    samples = sample(field, jax.random.normal(key, test.shape))
    axes[0].plot(*test.T, ".", ms=3, color="0.6", label="data, held out")
    axes[0].plot(*samples.T, ".", ms=3, color="C0", label="samples of the flow")
    axes[0].set(title="Two moons: data and samples", xlim=(-3.6, 3.6), ylim=(-2.5, 2.5))
    axes[0].legend(loc="upper right", markerscale=3)

    x, y = np.meshgrid(np.linspace(-3.6, 3.6, 91), np.linspace(-2.5, 2.5, 63))
    places = jnp.asarray(np.stack([x, y], axis=-1).reshape(-1, 2), jnp.float32)
    exact = evaluate(field, places, key[None], (2, 2)).values[0]
    density = np.exp(exact).reshape(x.shape)
    mesh = axes[1].pcolormesh(x, y, density, shading="gouraud", cmap="Blues")
    axes[1].figure.colorbar(mesh, ax=axes[1], label="density", shrink=0.75)
    axes[1].set(title="Two moons: density, exact divergence")
    for axis in axes:
        axis.set(aspect="equal", xlabel="$x_1$", ylabel="$x_2$")


def draw_path(axis, times: Float[Array, " m"], fixed: Stage, fresh: Stage) -> None:
    value, error = fixed.trace.value, fixed.trace.standard_error
    axis.plot(times, value, color="C0", label="same probes at all times")
    axis.fill_between(times, value - error, value + error, alpha=0.25, color="C0")
    axis.errorbar(
        times,
        fresh.trace.value,
        fresh.trace.standard_error,
        fmt=".",
        lw=0.8,
        color="C1",
        label="new probes at every time",
    )
    axis.plot(times, fixed.exact_trace, "k--", label="exact, 16 products")
    k = int(fixed.trace.stats["num_matvecs"][0])
    axis.set(
        title=f"Digits: tr J along a path, {k} products",
        xlabel="t",
        ylabel="tr J $\\pm$ standard error",
    )
    axis.set_ylim(bottom=-2)
    axis.legend(loc="lower left")


def draw_points(axis, points: Points, k: int) -> None:
    axis.axline((-15, -15), slope=1, color="k", lw=1, label="exact")
    axis.errorbar(
        points.exact,
        points.estimate,
        points.half_width,
        fmt=".",
        lw=0.7,
        label=f"{k} products, 95 % interval",
    )
    axis.set(
        title="Digits: log-density of held-out images",
        xlabel="exact divergence, 16 products",
        ylabel="estimated divergence",
    )
    axis.legend(loc="upper left")


def draw_digits(axes, field: VectorField, data: Digits, key: Key[Array, ""]) -> None:
    samples = sample(field, jax.random.normal(key, (24, NUM_COMPONENTS)))
    for axis, components, title in (
        (axes[0], data.test[:24], "Digits: held-out images, 16 components"),
        (axes[1], np.asarray(samples), "Digits: samples of the flow"),
    ):
        images = data.pca.inverse_transform(components).reshape(4, 6, 8, 8)
        images = np.pad(images, ((0, 0), (0, 0), (1, 1), (1, 1)))
        tiles = images.transpose(0, 2, 1, 3).reshape(40, 60)
        axis.imshow(tiles, cmap="gray_r", vmin=0, vmax=16)
        axis.set(title=title)
        axis.axis("off")


#
# The example
#


class Results(NamedTuple):
    moons_field: VectorField
    moons_test: Float[Array, "M 2"]
    digits_field: VectorField
    digits: Digits


def train_flows(key: Key[Array, ""]) -> Results:
    """Trains on both data sets and prints held-out averages."""
    train_key, evaluation_key = jax.random.split(key)

    print("Two moons")
    moons_train, moons_test = moons(10_000, seed=0), moons(1000, seed=1)
    moons_settings = settings(jnp.tanh, (1, 1), 400)
    moons_field = train(moons_train, train_key, moons_settings, 0.01)
    compare(moons_field, jnp.asarray(moons_test), evaluation_key, moons_settings.ks)
    print(f"  true density:{moons_log_likelihood(moons_test):35.4f}")
    print(f"  normal density:{normal_log_likelihood(moons_train, moons_test):33.4f}")

    data = digits()
    digits_settings = settings(jax.nn.swish, (4, 1), 200)
    for weight in (0.0, 0.1):
        print(f"Digits, {weight} times the regulariser")
        field = train(data.train, train_key, digits_settings, weight)
        compare(field, jnp.asarray(data.test), evaluation_key, digits_settings.ks)
    print(f"  normal density:{normal_log_likelihood(data.train, data.test):33.4f}")
    return Results(moons_field, jnp.asarray(moons_test), field, data)


def main(figure_path: str) -> None:
    train_key, points_key, path_key, draw_key = jax.random.split(jax.random.key(0), 4)
    results = train_flows(train_key)
    field, test = results.digits_field, jnp.asarray(results.digits.test)

    points = point_by_point(field, test, points_key, 4)
    inside = jnp.abs(points.estimate - points.exact) <= points.half_width
    print(f"  95 % intervals that hold the exact value: {inside.sum()} of {len(test)}")

    print("Digits, along the path of one image")
    times = jnp.linspace(0, 1, 25)
    keys = jax.random.split(path_key, 25)
    fresh = stages(field, test[0], times, keys, 8)
    fixed = stages(field, test[0], times, jnp.broadcast_to(keys[0], (25,)), 8)
    print_stages(times, fresh, rows=[0, 6, 12, 18, 24])

    figure, axes = plt.subplots(2, 3, figsize=(14, 8), layout="constrained")
    draw_moons(axes[0, :2], results.moons_field, results.moons_test, draw_key)
    draw_path(axes[0, 2], times, fixed, fresh)
    draw_points(axes[1, 0], jax.tree.map(lambda leaf: leaf[:100], points), 4)
    draw_digits(axes[1, 1:], field, results.digits, draw_key)
    figure.savefig(figure_path, dpi=110)
    print(f"Figure: {figure_path}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "continuous_normalising_flow.png")
