"""A target with a chosen chat template."""

from typing import Any

from serving import RecordingTarget


class TemplateTarget(RecordingTarget):
    """A target with the given chat template."""

    def __init__(self, chat_template: str, **options: Any) -> None:
        super().__init__(**options)
        self._chat_template = chat_template

    async def GetTokenizer(self, request: Any, context: Any) -> Any:
        response = await super().GetTokenizer(request, context)
        response.chat_template = self._chat_template
        return response
