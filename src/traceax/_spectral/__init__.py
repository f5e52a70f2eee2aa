"""Traces of functions of an operator."""
