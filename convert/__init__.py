"""Tools run from the repository that turn foreign checkpoints into the forms the library reads."""
