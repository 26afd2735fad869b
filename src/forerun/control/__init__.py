"""How much to guess. One file per policy behind the protocol in `base`."""
