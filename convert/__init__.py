"""Tools run from the repository that turn foreign checkpoints into the two forms the library reads, and back."""
