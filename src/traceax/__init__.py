"""Traces of linear operators that can only be applied, in JAX."""

from importlib.metadata import version as _version

from ._colours import ColouredSampler as ColouredSampler
from ._colours import Colours as Colours
from ._colours import colour as colour
from ._colours import lattice_colours as lattice_colours
from ._diagonal import diagonal as diagonal
from ._diagonal import frobenius_norm_squared as frobenius_norm_squared
from ._diagonal import leaf_traces as leaf_traces
from ._divergence import divergence as divergence
from ._divergence import laplacian as laplacian
from ._error_bar import ErrorBar as ErrorBar
from ._estimate import Estimate as Estimate
from ._estimators.adaptive_xtrace import (
    AdaptiveXTraceEstimator as AdaptiveXTraceEstimator,
)
from ._estimators.hutch_plus_plus import (
    HutchPlusPlusEstimator as HutchPlusPlusEstimator,
)
from ._estimators.hutchinson import HutchinsonEstimator as HutchinsonEstimator
from ._estimators.xnystrace import XNysTraceEstimator as XNysTraceEstimator
from ._estimators.xtrace import XTraceEstimator as XTraceEstimator
from ._likelihood import InvQuadLogdet as InvQuadLogdet
from ._likelihood import gaussian_log_likelihood as gaussian_log_likelihood
from ._likelihood import inv_quad_logdet as inv_quad_logdet
from ._linalg.whitening import Preconditioner as Preconditioner
from ._operators.convert import as_operator as as_operator
from ._operators.curvature import GaussNewtonLinearOperator as GaussNewtonLinearOperator
from ._operators.curvature import HessianLinearOperator as HessianLinearOperator
from ._operators.entries import columns as columns
from ._operators.entries import diagonal_entries as diagonal_entries
from ._operators.inverse import InverseLinearOperator as InverseLinearOperator
from ._operators.kernel import KernelLinearOperator as KernelLinearOperator
from ._operators.mean import MeanLinearOperator as MeanLinearOperator
from ._preconditioner import choose_pivots as choose_pivots
from ._results import RESULTS as RESULTS
from ._samplers import IndexedSampler as IndexedSampler
from ._samplers import NormalSampler as NormalSampler
from ._samplers import OrthogonalSampler as OrthogonalSampler
from ._samplers import RademacherSampler as RademacherSampler
from ._samplers import Sampler as Sampler
from ._samplers import SphereSampler as SphereSampler
from ._slope import jvp as jvp
from ._spectral.base import SpectralEstimator as SpectralEstimator
from ._spectral.krylov_aware import KrylovAwareEstimator as KrylovAwareEstimator
from ._spectral.lanczos_quadrature import (
    LanczosQuadratureEstimator as LanczosQuadratureEstimator,
)
from ._spectral.matrix_function import (
    MatrixFunctionLinearOperator as MatrixFunctionLinearOperator,
)
from ._spectral.state import SpectralState as SpectralState
from ._spectral_density import SpectralDensity as SpectralDensity
from ._spectral_density import spectral_density as spectral_density
from ._spectral_sums import logdet as logdet
from ._spectral_sums import schatten_norm as schatten_norm
from ._spectral_sums import trace_function as trace_function
from ._spectral_sums import trace_inverse as trace_inverse
from ._state import TraceState as TraceState
from ._state import init_state as init_state
from ._tolerance import NoProgressMeter as NoProgressMeter
from ._tolerance import ProgressMeter as ProgressMeter
from ._tolerance import TextProgressMeter as TextProgressMeter
from ._tolerance import TqdmProgressMeter as TqdmProgressMeter
from ._trace import CHOICES as CHOICES
from ._trace import trace as trace
from ._trace_estimator import GrowingEstimator as GrowingEstimator
from ._trace_estimator import TraceEstimator as TraceEstimator

__version__ = _version("traceax")
