"""The target's tokenizer as a zip archive, from which the gateway builds its own."""

import asyncio
import hashlib
import io
import json
import zipfile
from collections.abc import Iterator
from functools import cached_property

from smg_grpc_proto.generated import common_pb2 as smg

from specpool.protocol.tokenizer import TokenizerFiles

CHUNK_BYTES = 2**20


class TokenizerArchive:
    """A zip archive of tokenizer files, built on first use."""

    def __init__(self, files: TokenizerFiles, model_type: str) -> None:
        """`model_type`: name of the architecture in `transformers`."""
        self._files, self._model_type = files, model_type
        self._building = asyncio.Lock()

    async def chunks(self) -> Iterator[smg.GetTokenizerChunk]:
        """Return the archive in chunks. The last one carries its SHA-256."""
        async with self._building:  # once for all callers, in a thread: large vocabularies take a while
            data, fingerprint = await asyncio.to_thread(lambda: self._archive)
        starts = range(0, len(data), CHUNK_BYTES)
        return (
            smg.GetTokenizerChunk(
                data=data[start : start + CHUNK_BYTES], sha256=fingerprint if start == starts[-1] else ""
            )
            for start in starts
        )

    @cached_property
    def _archive(self) -> tuple[bytes, str]:
        """The archive and its SHA-256. Both are deterministic."""
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w") as archive:
            for name, content in self._contents().items():
                archive.writestr(zipfile.ZipInfo(name), content, zipfile.ZIP_DEFLATED)
        data = buffer.getvalue()
        return data, hashlib.sha256(data).hexdigest()

    def _contents(self) -> dict[str, bytes]:
        """Return the files by name. The two config files hold only the fields that tokenizers need."""
        files = self._files
        config = {"model_type": self._model_type, "eos_token_id": files.eos_token_ids}
        contents = {
            "tokenizer.json": files.tokenizer_json,
            "tokenizer_config.json": json.dumps(files.special_tokens).encode(),
            "config.json": json.dumps(config).encode(),
        }
        if files.chat_template:
            contents["chat_template.jinja"] = files.chat_template.encode()
        return contents
