"""Many programs at once: a matrix cut into cells, planned, carried out, put together. docs/reference/building.md."""
