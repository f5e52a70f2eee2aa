"""Error bars and tolerances."""
