"""A model's tokenizer, and its files for the coordinator."""

from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase
from transformers.utils.hub import cached_file

from specpool.engine.config.sources import UnsupportedModelError, source_of
from specpool.engine.models.config import explain
from specpool.engine.models.gguf_reader import GgufFile
from specpool.engine.models.gguf_tokenizer import END_IDS, gguf_tokenizer
from specpool.engine.models.model_files import MAX_FILE_BYTES, read_json
from specpool.protocol.tokenizer import TokenizerFiles

PROCESSOR_TEMPLATE = "chat_template.json"


def load_tokenizer(model: str, revision: str | None = None) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a hub id, a folder or a GGUF file. Raises UnsupportedModelError."""
    source = source_of(model, revision)
    try:
        if "gguf_file" in source:
            return gguf_tokenizer(GgufFile(Path(source["pretrained_model_name_or_path"], source["gguf_file"])))
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(**source)
        if tokenizer.chat_template is None:  # older vision-language models store it in a file of its own
            optional: Any = {"revision": revision, "_raise_exceptions_for_missing_entries": False}
            if (file := cached_file(model, PROCESSOR_TEMPLATE, **optional)) is not None:
                tokenizer.chat_template = read_json(Path(file), MAX_FILE_BYTES).get("chat_template")
    except Exception as error:  # the files may contain anything
        raise UnsupportedModelError(f"its tokenizer cannot be read: {explain(error)}") from error
    return tokenizer


def tokenizer_files(tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel) -> TokenizerFiles:
    """Return the files of a tokenizer. Raises UnsupportedModelError if it has no fast form."""
    if not tokenizer.is_fast:
        raise UnsupportedModelError("the tokenizer has no fast (tokenizer.json) form")
    # The files of a model may disagree on its end-of-sequence tokens; all of them count.
    ids = {tokenizer.eos_token_id, *tokenizer.init_kwargs.get(END_IDS, ())}
    for config in (model.config, model.generation_config):
        eos = getattr(config, "eos_token_id", None)
        ids.update(eos if isinstance(eos, list) else [eos])
    ids.discard(None)
    templates = tokenizer.chat_template
    if not isinstance(templates, dict):  # by name
        templates = {"default": templates}
    return TokenizerFiles(
        tokenizer_json=tokenizer.backend_tokenizer.to_str().encode(),
        chat_template=templates.get("default") or "",
        special_tokens={name: text for name, text in tokenizer.special_tokens_map.items() if isinstance(text, str)},
        eos_token_ids=tuple(sorted(ids)),
        tool_chat_template=templates.get("tool_use") or "",
    )
