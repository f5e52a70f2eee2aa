"""Linear operators."""
