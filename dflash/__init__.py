"""dflash: train the DFlash drafter that makes a language model answer several times faster.

Two stages that share nothing but a folder on disk: `extract` runs the target once and writes its hidden states as
Zarr shards; `train` memory-maps the shards into the drafter's training loop and never opens the target.
"""

__version__ = "0.1.0"
