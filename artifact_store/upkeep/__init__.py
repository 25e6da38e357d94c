"""Looking after a store: what must stay, what may go, whether all is well, and whether its ground can be trusted."""
