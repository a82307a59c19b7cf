"""`specpool.vllm.RemoteDraft`: a draft worker for a vLLM server. The import loads neither vLLM nor torch."""

from specpool.vllm.remote_draft import RemoteDraft

__all__ = ["RemoteDraft"]
