"""Every error that forerun raises on purpose.

A message names the value, what is allowed and what to do. Nothing else in the package defines exceptions.
"""


class ForerunError(Exception):
    """Base of all errors raised by forerun."""


class ConfigError(ForerunError):
    """A setting is unknown, malformed, or not possible together with another one."""


class ModelError(ForerunError):
    """A model cannot be found, read or run."""


class ModelNotFoundError(ModelError):
    """No model under the given name in any of the places that were looked in."""


class UnsupportedModelError(ModelError):
    """The model exists, but its architecture (or a feature of it) is not supported."""


class WeightsError(ModelError):
    """A weight file is truncated, corrupt or lacks a tensor."""


class TokenizerError(ModelError):
    """The tokenizer or the chat template is missing or broken."""


class CacheMemoryError(ForerunError):
    """The key/value cache does not fit in memory, or a request does not fit in the cache."""


class DraftModelError(ForerunError):
    """A draft model cannot serve this target."""


class InvalidRequestError(ForerunError):
    """One request is wrong; other requests are not concerned."""


class EngineError(ForerunError):
    """The engine failed while it served a request, or was used after it was closed."""
