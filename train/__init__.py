"""Stage two: the drafter's training loop. It reads a store and never opens the target."""
