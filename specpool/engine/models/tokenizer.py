"""A model's tokenizer, as files for the coordinator."""

from transformers import PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from specpool.engine.config.sources import UnsupportedModelError
from specpool.protocol.tokenizer import TokenizerFiles


def tokenizer_files(tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel) -> TokenizerFiles:
    """Return the files of a tokenizer. Raises UnsupportedModelError if it has no fast form."""
    if not tokenizer.is_fast:
        raise UnsupportedModelError("the tokenizer has no fast (tokenizer.json) form")
    # The files of a model may disagree on its end-of-sequence tokens; all of them count.
    ids = {tokenizer.eos_token_id}
    for config in (model.config, model.generation_config):
        eos = getattr(config, "eos_token_id", None)
        ids.update(eos if isinstance(eos, list) else [eos])
    templates = tokenizer.chat_template
    if not isinstance(templates, dict):  # by name
        templates = {"default": templates}
    return TokenizerFiles(
        tokenizer_json=tokenizer.backend_tokenizer.to_str().encode(),
        chat_template=templates.get("default") or "",
        special_tokens={name: text for name, text in tokenizer.special_tokens_map.items() if isinstance(text, str)},
        eos_token_ids=tuple(sorted(ids - {None})),
        tool_chat_template=templates.get("tool_use") or "",
    )
