"""Where guesses come from: one file per drafter behind the protocol in `base`, the draft tree, and merging."""
