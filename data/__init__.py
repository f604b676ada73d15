"""Stage 0: conversations become documents (token ids and a supervised mask) and the plan of their rows.

`conversations` reads every input form, `render` finds what the target would have to generate, `prepare` writes
documents and plan; `prompts` and `regenerate` have the target answer prompts itself. Imported as `dflash.data`; imports
no other stage.
"""
