"""An HTTP server with OpenAI's API. It is a client of `GenerationService`."""
