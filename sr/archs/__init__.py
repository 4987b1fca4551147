"""One file per network family; importing this package registers them all."""
