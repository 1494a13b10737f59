"""References on disk: written once, read in slices by ranks, kept between runs."""
