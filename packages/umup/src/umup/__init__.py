"""u-muP: unit-scaled maximal update parametrization (Blake et al., ICLR 2025)."""
