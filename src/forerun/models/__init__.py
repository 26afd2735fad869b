"""From a model's name to a decoder that runs: finding, reading, tokenizing, describing, computing."""
