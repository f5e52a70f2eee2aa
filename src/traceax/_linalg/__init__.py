"""Dense linear algebra: arrays in, arrays out."""
