"""`dflash doctor`: what of this machine the two stages can use, and what it costs."""
