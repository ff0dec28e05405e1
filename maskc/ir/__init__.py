"""Typed mask IR, its lowering to row intervals, and the proof. Knows neither source text nor GPUs nor torch."""
