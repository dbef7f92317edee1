"""One folder per op: `api` (the public function), `reference` (plain, slow, obviously right), `xla` where a form of the
same maths suits XLA better, `specs` (named real shapes that tests and benches share). Kernels know nothing of models."""
