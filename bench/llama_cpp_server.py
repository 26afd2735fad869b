"""llama.cpp's own HTTP server on the loopback, as the package `xllamacpp` brings it. Runs under the peer's Python.

    python llama_cpp_server.py '{"model": {"path": "model.gguf"}, "cpuparams": {"n_threads": 2}}'

The argument is a JSON object of llama.cpp's parameters by their own names, nested as they are; values of enumerations
are given by name. Prints one line, a JSON object {address, version, system, speculation}, when the server answers, and
runs until its standard input ends. Needs nothing but the standard library and xllamacpp.
"""

import json
import sys
from typing import Any

import xllamacpp


def assign(target: Any, values: dict[str, Any]) -> None:
    """Set the attributes of `target`, and of its parts where a value is an object itself.

    Raises AttributeError for a parameter that this version of llama.cpp does not have.
    """
    for name, value in values.items():
        if not hasattr(target, name):
            raise AttributeError(f"llama.cpp {xllamacpp.__version__} has no parameter {name!r}")
        if isinstance(value, dict):
            assign(getattr(target, name), value)
        else:
            setattr(target, name, _plain(value))


def _plain(value: Any) -> Any:
    """The value itself, or the member of an enumeration whose name it is, also within lists."""
    if isinstance(value, list):
        return [_plain(each) for each in value]
    for kind in (xllamacpp.common_speculative_type, xllamacpp.llama_flash_attn_type):
        if isinstance(value, str) and value in kind.__members__:
            return kind[value]
    return value


def main() -> None:
    """Start the server, say where it is, and wait until nobody needs it any more."""
    params = xllamacpp.CommonParams()
    assign(params, json.loads(sys.argv[1]))
    server = xllamacpp.Server(params)
    about = {
        "address": server.listening_address,
        "version": xllamacpp.__version__,
        "system": xllamacpp.get_system_info().strip(),
        "speculation": sorted(xllamacpp.common_speculative_type.__members__),
    }
    print(json.dumps(about), flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
