"""An estimate in the words of a line."""

import math
from typing import Any

import numpy as np


def number_with_error(value: Any, error: Any, low: Any, high: Any) -> str:
    """A number, with the digits that its error leaves, and its interval."""
    if np.iscomplexobj(value):
        value, low, high = (complex(x) for x in (value, low, high))
        real = number_with_error(value.real, error, low.real, high.real)
        imaginary = number_with_error(value.imag, error, low.imag, high.imag)
        return f"real part {real}, imaginary part {imaginary}"
    value, error = float(value), float(error)
    if error == 0:
        return f"{value:.6g} (exact)"
    if not math.isfinite(error) or not math.isfinite(value):
        return f"{value:.4g} +- unknown"
    # Two digits of the error, and the value to the same place.
    place = 1 - math.floor(math.log10(error))
    exponent = math.floor(math.log10(max(abs(value), error)))
    digits = max(exponent + place, 1) + 1

    def of(x):
        return _to_place(float(x), place, exponent, digits)

    plain = of(value), f"{error:.{place}f}" if 0 < place < 5 else f"{error:.2g}"
    return f"{plain[0]} +- {plain[1]} (95 %: {of(low)} to {of(high)})"


def _to_place(x: float, place: int, exponent: int, digits: int) -> str:
    if -4 <= exponent < 6:
        return f"{x:.{max(place, 0)}f}"
    return f"{x:.{min(digits - 1, 16)}e}"


def array_with_errors(value: np.ndarray, error: np.ndarray, *_: np.ndarray) -> str:
    """An array of estimates: its shape, and the size of entries and of their errors."""

    def root_mean_square(x):
        largest = float(np.max(np.abs(x), initial=0.0))
        if largest == 0 or not math.isfinite(largest):
            return largest
        return largest * math.sqrt(np.mean(np.abs(x / largest) ** 2))

    sizes = f"root mean square {root_mean_square(value):.4g}"
    if (error == 0).all():
        return f"{sizes} (exact), shape {value.shape}"
    if not np.isfinite(error).all():
        return f"{sizes} +- unknown, shape {value.shape}"
    return f"{sizes} +- {root_mean_square(error):.2g}, shape {value.shape}"
