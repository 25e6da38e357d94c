"""A model before it is compiled: where its configuration and weights come from."""
