"""Ask for a chat completion through OpenAI's API. `helm test` runs this in the coordinator's image."""

import json
import os
import ssl
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

URL = os.environ["OPENAI_URL"]
CERT, KEY, TOKEN_FILE = (os.environ.get(f"SPECPOOL_{name}") for name in ("TLS_CERT", "TLS_KEY", "TOKEN_FILE"))
TLS = ssl.create_default_context(cafile=os.environ.get("SPECPOOL_TLS_CA")) if URL.startswith("https:") else None
if TLS is not None and CERT is not None:
    TLS.load_cert_chain(CERT, KEY)
HEADERS = {"Content-Type": "application/json"}
if TOKEN_FILE is not None:
    HEADERS["Authorization"] = f"Bearer {Path(TOKEN_FILE).read_text().strip()}"


def call(path: str, body: object = None) -> dict[str, Any]:
    """Send a request; retry for a minute while the server starts."""
    request = urllib.request.Request(URL + path, None if body is None else json.dumps(body).encode(), HEADERS)
    deadline = time.monotonic() + 60
    while True:
        try:
            with urllib.request.urlopen(request, context=TLS, timeout=120) as response:
                return json.load(response)
        except urllib.error.URLError as error:
            if getattr(error, "code", 503) != 503 or time.monotonic() > deadline:
                raise
            time.sleep(1)


model = call("/v1/models")["data"][0]["id"]
messages = [{"role": "user", "content": os.environ["PROMPT"]}]
limit = int(os.environ["SPECPOOL_MAX_TOKENS"])
completion = call("/v1/chat/completions", {"model": model, "messages": messages, "max_tokens": limit})
assert completion["usage"]["completion_tokens"] > 0, completion
print(f"{model}: {completion['usage']['completion_tokens']} tokens over HTTP")
