"""What published draft checkpoints say, one module for each method that has some.

Formats ("dialects") differ in keys, tensor names and in how they number the target's layers. All of
that ends here: a module turns any of them into one `DraftModel`, with one geometry, one set of
tensor names and one numbering. What heads on the target's states have in common is in `draft_head`.
"""
