"""One file per peer."""
