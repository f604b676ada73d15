"""Stage 1: run the target once over the documents and write its hidden states to a store.

`run` is the whole stage; `forecast` says what it costs before anything is loaded; `pipeline` moves states from the
target to the disk; `states` is what happens on the device. Imported as `dflash.extract`; imports no other stage.
"""
