//! The protobuf surface: generated code, conversions to types, errors to gRPC status.
