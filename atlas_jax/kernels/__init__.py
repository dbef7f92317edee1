"""One folder per op: `api` (the public function), `reference` (plain, slow, obviously right) and `xla` where another
form of the same maths suits XLA better. Kernels know nothing of models."""
