"""One estimator family a file; siblings don't import each other."""
