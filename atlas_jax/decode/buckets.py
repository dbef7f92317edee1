"""Which shapes are compiled, and which of them a step runs in."""

from __future__ import annotations

import dataclasses

from atlas_jax.decode.plan import Bucket
from atlas_jax.depth.policies import Policy


@dataclasses.dataclass(frozen=True)
class BucketConfig:
    """The grid of compiled shapes; a step's needs are rounded up to it.

    Attributes:
      n: batch sizes.
      k: rows per sequence.
      ragged: also compile row counts between `n` and `n * k`, in steps of `max(1, n // 2)`. Worth its compile time
        where depths differ between sequences; a fixed policy fills `n * k` but for its first and last steps.
    """

    n: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    k: tuple[int, ...] = (1, 2, 3, 4, 5)
    ragged: bool = False

    def check(self, slots: int) -> None:
        """Raises `ValueError` where a full engine would not fit the grid."""
        if slots > max(self.n):
            raise ValueError(f"{slots} slots exceed the largest batch bucket {max(self.n)}")

    def fit(self, n: int, k: int, rows: int, head: bool) -> Bucket:
        """The smallest bucket with room for n sequences of up to k rows, `rows` in all. `ValueError` if none has."""
        n_fit, k_fit = (min((x for x in sizes if x >= want), default=0) for sizes, want in ((self.n, n), (self.k, k)))
        if not n_fit or not k_fit:
            raise ValueError(f"no bucket for {n} sequences of {k} rows; batches are {self.n}, rows {self.k}")
        return Bucket(n_fit, k_fit, self._rows(n_fit, k_fit, rows), head)

    def _rows(self, n: int, k: int, rows: int) -> int:
        if not self.ragged:
            return n * k
        pace = max(1, n // 2)
        return min(n * k, max(n, -(-rows // pace) * pace))

    def reachable(self, policy: Policy, concurrency: int) -> set[Bucket]:
        """Every bucket that steps of 1 to `concurrency` sequences can need under the policy, drains included."""
        found: set[Bucket] = set()
        depths = frozenset().union(*(policy.depths(n) for n in range(1, concurrency + 1)))
        for n in range(1, concurrency + 1):
            # While sequences come and go, what the last step's depth left pending is folded in this step's bucket.
            for k in {max(before, now) + 1 for before in depths for now in policy.depths(n)}:
                counts = range(n, n * k + 1) if self.ragged else (n * k,)
                found |= {self.fit(n, k, rows, policy.head) for rows in counts}
        return found
