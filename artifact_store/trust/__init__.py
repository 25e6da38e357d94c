"""Who vouches for what a store holds. Section 12 of docs/store-format.md."""
