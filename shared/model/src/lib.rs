//! The gpt-oss model on disk: config, checkpoints, MXFP4, sharding; and gpt-oss-nano itself.
