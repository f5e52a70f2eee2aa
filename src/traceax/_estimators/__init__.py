"""One estimator family per file. Siblings don't import each other."""
