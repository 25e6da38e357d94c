"""How a build of many cells looks while it runs, and what it leaves to read."""
