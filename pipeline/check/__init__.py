"""Static check of a model: whether it compiles for a target and fits, in seconds and without weights."""
