"""Which guesses stand: sampling parameters, the noise, the choice, the walk down the draft tree.

Nothing here drafts or computes logits. Import from the modules: this file stays empty, so that drafting and
verification can use each other's data types.
"""
