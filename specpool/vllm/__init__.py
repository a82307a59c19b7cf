"""`specpool.vllm.RemoteDraft`: a draft worker drafts for a vLLM server. Neither vLLM nor torch is imported for it."""

from specpool.vllm.remote_draft import RemoteDraft

__all__ = ["RemoteDraft"]
