"""When balancing and draining move segments, and how many at the same time."""

from __future__ import annotations

from typing import Final

import msgspec

from braid.model.errors import InvalidConfig


class BalancePolicy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Fields that end in `_s` are seconds."""

    interval_s: float = 30.0
    """How often the leader looks; 1 to 3,600. As long as the half-life of the rates, and as brokers take at the most to
    report them (load_reports.py)."""
    stale_intervals: int = 3
    """A report older than so many intervals stops all balancing; 1 to 100. One late report is no trouble, three are."""
    threshold: float = 1.25
    """Nothing moves while the busiest broker has at most so many times the mean; 1.05 to 10. Below, noise decides."""
    min_gain: float = 0.001
    """The least that a move must gain, as a part of the mean; above 0, at most 1. So small because a broker of a
    thousand even segments should still be relieved; the best move goes first, so small ones come only when none is
    better."""
    quiet_bytes_per_s: int = 1 << 20
    """Nothing moves while the busiest broker has less; 0 or more. Every broker carries as much without noticing."""
    moves_at_once: int = 2
    """Moves in flight, those of operators included; 1 to 64. Each is a short pause for its topic's clients."""
    moves_per_hour: int = 60
    """Moves that balancing begins; 1 to 3,600. It bounds what a load that outruns balancing can cost."""
    segment_cooldown_s: float = 1_800.0
    """How long a segment stays after a move; 0 to 604,800 (a week). Its clients are disturbed at most so often."""
    broker_cooldown_s: float = 120.0
    """How long a broker neither gives nor gets after a move; 0 to 86,400, and at least two intervals: until its rates,
    smoothed over 30 s, show the move."""
    payback_s: float = 3_600.0
    """A move must relieve its broker, in this time, of more bytes than it copies; 1 to 604,800. Only where moves copy
    history."""
    max_target_cpu: float = 0.85
    """A broker that uses more of its core gets nothing; 0.1 to 1. Small records cost more than their bytes say."""
    drain_moves_at_once: int = 8
    """Moves in flight off one draining broker; 1 to 64. More than when balancing: an operator waits for them."""

    def __post_init__(self) -> None:
        for name, least, most in _POLICY_LIMITS:
            value = getattr(self, name)
            if not least <= value <= most:
                raise InvalidConfig(f"{name} is {value}; it must be from {least:,g} to {most:,g}")
        if self.broker_cooldown_s < 2 * self.interval_s:
            raise InvalidConfig(
                f"broker_cooldown_s is {self.broker_cooldown_s:g} and interval_s {self.interval_s:g}; a broker must "
                "rest for at least two intervals, or the next decision would not know of the last move"
            )


_POLICY_LIMITS: Final = (
    ("interval_s", 1, 3_600),
    ("stale_intervals", 1, 100),
    ("threshold", 1.05, 10),
    ("min_gain", 1e-6, 1),
    ("quiet_bytes_per_s", 0, 1 << 50),
    ("moves_at_once", 1, 64),
    ("moves_per_hour", 1, 3_600),
    ("segment_cooldown_s", 0, 604_800),
    ("broker_cooldown_s", 0, 86_400),
    ("payback_s", 1, 604_800),
    ("max_target_cpu", 0.1, 1),
    ("drain_moves_at_once", 1, 64),
)
