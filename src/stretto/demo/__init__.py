"""The demo: a tiny model that half knows Knights and Knaves, shipped with the package."""
