"""An HTTP server for OpenAI's API, built as a client of `GenerationService`."""
