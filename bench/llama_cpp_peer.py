"""llama.cpp as a peer: a Q8_0 file of the model that forerun answers with, and a client for its server.

llama.cpp is no dependency of forerun: it runs in a process of its own, under any Python that has `xllamacpp`.
"""

import http.client
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit

import gguf
import numpy as np
from comparison import Arrivals
from gguf.quants import dequantize, quantize

from forerun.bench.measure import Answer
from forerun.errors import ForerunError
from forerun.models.locate import cache_root, cache_writes, locate

INSTALL = "python -m venv peer && peer/bin/pip install xllamacpp"
SERVER = Path(__file__).with_name("llama_cpp_server.py")
_Q8_0 = gguf.GGMLQuantizationType.Q8_0


class PeerError(ForerunError):
    """llama.cpp is not there, does not start, or answers with something else than an answer."""


@dataclass(frozen=True)
class Speculation:
    """One of llama.cpp's ways of guessing without a draft model. type: as in `--spec-type`.

    name: for people. settings: parameters of the speculation, by llama.cpp's names.
    """

    name: str
    type: str
    settings: dict[str, Any]

    @property
    def parameters(self) -> dict[str, Any]:
        """What the server is to be told."""
        member = f"COMMON_SPECULATIVE_TYPE_{self.type.replace('-', '_').upper()}"
        return {"speculative": {"types": [member], **self.settings}}


def ngram_map(kind: str, pattern: int, guess: int) -> Speculation:
    """ngram-simple, ngram-map-k or ngram-map-k4v: `guess` tokens that came after the last `pattern` tokens before."""
    sizes = {"size_n": pattern, "size_m": guess}
    return Speculation(f"{kind} {pattern}/{guess}", kind, {kind.replace("-", "_"): sizes})


def ngram_mod(pattern: int, fewest: int, most: int) -> Speculation:
    """A table of hashed patterns that all requests share; it guesses `fewest` to `most` tokens, or none."""
    settings = {"n_match": pattern, "n_min": fewest, "n_max": most}
    return Speculation(f"ngram-mod {pattern}/{fewest}-{most}", "ngram-mod", {"ngram_mod": settings})


def ngram_cache(most: int) -> Speculation:
    """Statistics of short patterns in the request so far, as in llama.cpp's lookup decoding."""
    return Speculation(f"ngram-cache {most}", "ngram-cache", {"draft": {"n_max": most}})


@dataclass(frozen=True)
class PeerServer:
    """A running server. about: its version, what its build uses of the processor, the kinds of speculation it knows."""

    about: dict[str, Any]

    def complete(self, tokens: Sequence[int], max_tokens: int, *, ignore_eos: bool) -> Answer:
        """Answer one prompt greedily; times are by llama.cpp's own clock. Raises PeerError."""
        with self._post(tokens, max_tokens, ignore_eos, stream=False) as response:
            answer = json.loads(response.read())
        timings = answer["timings"]
        if timings["prompt_n"] != len(tokens):
            raise PeerError(
                f"llama.cpp computed {timings['prompt_n']} of {len(tokens)} prompt tokens; a comparison needs all of "
                "them, so its prompt cache must be off"
            )
        return Answer(
            token_ids=tuple(answer["tokens"]),
            ttft_s=timings["prompt_ms"] / 1e3,
            decode_s=timings["predicted_ms"] / 1e3,  # its clock starts anew when the first token is there
            decode_tokens=timings["predicted_n"] - 1,
            drafted=timings.get("draft_n", 0),
            accepted=timings.get("draft_n_accepted", 0),
        )

    def stream(self, tokens: Sequence[int], max_tokens: int, *, ignore_eos: bool) -> Arrivals:
        """Answer one prompt greedily, and note when tokens arrive. Raises PeerError."""
        arrivals = []
        with self._post(tokens, max_tokens, ignore_eos, stream=True) as response:
            for line in response:
                if line.startswith(b"data: "):
                    now = time.perf_counter()
                    arrivals.append((now, int(json.loads(line[6:])["tokens_predicted"])))
        return arrivals

    @contextmanager
    def _post(
        self, tokens: Sequence[int], max_tokens: int, ignore_eos: bool, *, stream: bool
    ) -> Iterator[http.client.HTTPResponse]:
        body = {
            "prompt": list(tokens),
            "n_predict": max_tokens,
            "ignore_eos": ignore_eos,
            "temperature": 0.0,
            "samplers": ["top_k"],  # the one token with the highest logit; the usual chain of filters costs time
            "top_k": 1,
            "cache_prompt": False,
            "return_tokens": True,
            "stream": stream,
        }
        connection = http.client.HTTPConnection(urlsplit(self.about["address"]).netloc, timeout=3600)
        try:
            connection.request("POST", "/completion", json.dumps(body), {"Content-Type": "application/json"})
            response = connection.getresponse()
            if response.status != 200:
                raise PeerError(f"llama.cpp refused a prompt of {len(tokens)} tokens: {response.read().decode()}")
            yield response
        except (OSError, http.client.HTTPException) as error:
            raise PeerError(f"llama.cpp's server at {self.about['address']} broke off: {error!r}") from error
        finally:
            connection.close()


@contextmanager
def serve(
    python: Path, model: Path, *, threads: int, context: int, parallel: int = 1, speculation: Speculation | None = None
) -> Iterator[PeerServer]:
    """Run llama.cpp's server on the loopback until the block ends.

    python: one that has xllamacpp. model: a .gguf file. context: most tokens of prompt and answer of one request.
    Raises PeerError when the server does not start, with what it said.
    """
    settings = {
        "model": {"path": str(model)},
        "cpuparams": {"n_threads": threads},
        "cpuparams_batch": {"n_threads": threads},
        "flash_attn_type": "LLAMA_FLASH_ATTN_TYPE_DISABLED",
        "n_ctx": context * parallel,
        "n_parallel": parallel,
        "n_threads_http": parallel + 2,  # a request holds a thread as long as it lasts
        "hostnames": ["127.0.0.1"],
        "fit_params": False,
        "ui": False,
        # Nothing is kept from one request for the next, so that no time goes into keeping it either.
        "cache_prompt": False,
        "cache_ram_mib": 0,
        "cache_idle_slots": False,
        "n_ctx_checkpoints": 0,
    }
    with tempfile.TemporaryFile("w+b") as log:
        child = subprocess.Popen(
            [str(python), str(SERVER), json.dumps(settings | (speculation.parameters if speculation else {}))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
        )
        try:
            yield PeerServer(_read_about(child, log))
        finally:
            child.communicate()  # closes its standard input, upon which it ends


def check_installed(python: Path) -> None:
    """Raise PeerError, with the command that installs it, when `python` has no xllamacpp."""
    try:
        found = subprocess.run([str(python), "-c", "import xllamacpp"], capture_output=True, text=True, check=False)
    except OSError as error:
        raise PeerError(f"--peer-python {python} cannot be run ({error.strerror}); make one with: {INSTALL}") from error
    if found.returncode:
        reason = (found.stderr.strip().splitlines() or ["it died"])[-1]
        raise PeerError(
            f"llama.cpp is not installed for {python} ({reason}); install it apart from forerun with: {INSTALL}, "
            "and name that Python with --peer-python peer/bin/python"
        )


def _read_about(child: subprocess.Popen[bytes], log: IO[bytes]) -> dict[str, Any]:
    """The line that the server prints when it answers. llama.cpp may print others before it."""
    assert child.stdout is not None
    for line in child.stdout:
        if line.startswith(b'{"address"'):
            about: dict[str, Any] = json.loads(line)
            return about
    log.seek(0)
    said = log.read().decode(errors="replace").strip().splitlines()[-15:]
    raise PeerError("llama.cpp's server did not start; the last it said:\n" + "\n".join(said))


def q8_0_file(model: str) -> Path:
    """A GGUF of forerun's model `model` with all matrices in Q8_0, made once and kept in the model cache.

    Raises ModelError when the cache cannot be written, PeerError when the model is no single GGUF file.
    """
    files = locate(model)
    if files.kind != "gguf" or len(files.parts) != 1:
        raise PeerError(f"model {model!r} is {files.path}; llama.cpp needs a single .gguf file: name one with --model")
    stat = files.path.stat()
    directory = cache_root() / "peers"
    target = directory / f"{files.path.stem}-{stat.st_size}-{stat.st_mtime_ns}-Q8_0.gguf"
    if not target.is_file():
        print(f"writing {target.name}", file=sys.stderr)
        with cache_writes(directory):
            directory.mkdir(parents=True, exist_ok=True)
            handle, partial = tempfile.mkstemp(dir=directory, suffix=".partial")
            os.close(handle)
            try:
                _write_q8_0(files.path, Path(partial))
                os.replace(partial, target)
            finally:
                Path(partial).unlink(missing_ok=True)
    return target


def _write_q8_0(source: Path, target: Path) -> None:
    """Copy a GGUF file, with every matrix that is not in Q8_0 yet requantised."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, reader.fields[gguf.Keys.General.ARCHITECTURE].contents())
    for name, entry in reader.fields.items():
        value_type = entry.types[0]
        if name.startswith("GGUF.") or name in (gguf.Keys.General.ARCHITECTURE, gguf.Keys.General.FILE_TYPE):
            continue  # the writer's own, or no longer true
        of = entry.types[-1] if value_type == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name, entry.contents(), value_type, sub_type=of)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0)
    for tensor in reader.tensors:
        data, kind = tensor.data, tensor.tensor_type
        if len(tensor.shape) > 1 and kind != _Q8_0:
            data, kind = quantize(dequantize(np.asarray(data), kind), _Q8_0), _Q8_0
        writer.add_tensor(tensor.name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
