"""Training of EAGLE-3 drafts: data, loss, update, loop, checkpoints."""
