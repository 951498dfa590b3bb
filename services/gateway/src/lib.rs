//! The only service that knows text: OpenAI-compatible HTTP and gRPC Chat.
