"""What a run did, counted while it runs."""

import threading
from dataclasses import dataclass, field


@dataclass
class Totals:
    """What a run did. Guarded by `lock`, since writer threads add to it."""

    tokens: int = 0
    rows: int = 0  # of the store, earlier runs' included, as `bad` is
    shards: int = 0
    bad: int = 0
    supervised: int = 0
    agreeing: int = 0
    idle: float = 0.0  # seconds in which the target waited for a free buffer
    filling: float = 0.0  # seconds spent on inputs, beside a GPU's work or between a CPU's forwards
    overlapping: bool = False  # whether inputs are filled while the target works
    disk_idle: float = 0.0  # seconds in which no writer thread had anything to write
    seconds: float = 0.0
    lock: threading.Lock = field(default_factory=threading.Lock)
