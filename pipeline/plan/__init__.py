"""Plans: which instances, how many and at what cost; and whether a published figure can be true."""
