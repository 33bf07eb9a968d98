"""Says which downsets are wanted, `CutLimits`, and holds those listed, `CutList`."""

from __future__ import annotations

from dataclasses import dataclass

from autovaruna.planner.partition.resources import Resources
from autovaruna.planner.partition.words import Bools, Floats, Ints, Words

_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class CutLimits:
    """Which downsets are listed.

    With ``price(D)`` and ``share(D)`` the sums of `prices` and `shares` over the nets open at D, D is listed if
    ``price(D) <= most_price`` and, for every resource r,
    ``use(r, D) + crossing(r) * share(D) <= before(r)`` and
    ``use(r, rest) + crossing(r) * (price(D) - share(D)) <= after(r)``;
    and if ``use(r, D) <= most_before(r)``, ``use(r, rest) <= most_after(r)``.

    Attributes:
        prices: of each net, not negative.
        shares: of each net, any sign.
    """

    prices: Floats
    shares: Floats
    most_price: float
    before: Floats
    after: Floats
    most_before: Floats
    most_after: Floats

    def keep(self, use: Floats, price: Floats, share: Floats, resources: Resources) -> Bools:
        """Tells which downsets are within the limits.

        Args:
            use: of each resource, shape (resources, downsets).
            price, share: of the nets open at each, shape (downsets,).
            resources: what may be used.
        """
        rest = resources.use.sum(axis=1)[:, None] - use
        return self.may_keep(use, rest, price, share, price - share, resources)

    def may_keep(
        self, use: Floats, rest: Floats, price: Floats, before: Floats, after: Floats, resources: Resources
    ) -> Bools:
        """Tells what is within the limits, if these are the least figures it can get."""
        crossing = resources.crossing[:, None]
        wide = _ROUNDING * resources.use.sum(axis=1)[:, None]
        kept: Bools = price <= self.most_price * (1.0 + _ROUNDING) + wide.max()
        for used, sides, most, all_of in (
            (use, before, self.most_before, self.before),
            (rest, after, self.most_after, self.after),
        ):
            kept &= (used <= most[:, None] + wide).all(axis=0)
            kept &= (used + crossing * sides <= all_of[:, None] + wide).all(axis=0)
        return kept


@dataclass(frozen=True, slots=True)
class CutList:
    """Downsets, and what `CutLimits` is about.

    Attributes:
        downsets: shape (downsets, words of blocks).
        use: of each resource, shape (resources, downsets).
        price, share: of the nets open at each, shape (downsets,).
    """

    downsets: Words
    use: Floats
    price: Floats
    share: Floats

    def pick(self, which: Bools | Ints) -> CutList:
        """Returns some of the downsets."""
        return CutList(self.downsets[which], self.use[:, which], self.price[which], self.share[which])

    def __len__(self) -> int:
        return len(self.price)
