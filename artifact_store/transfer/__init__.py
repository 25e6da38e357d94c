"""Reading a store from afar: mirrors, a cache on this machine, large blobs in parallel, artifacts into folders."""
