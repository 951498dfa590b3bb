//! Clients with the message limits of this protocol.

use tonic::transport::Channel;

use crate::MAX_MESSAGE_BYTES;
use crate::pb::decode_client::DecodeClient;
use crate::pb::inference_client::InferenceClient;
use crate::pb::prefill_client::PrefillClient;
use crate::pb::worker_client::WorkerClient;

/// Calls a router.
#[must_use]
pub fn inference(channel: Channel) -> InferenceClient<Channel> {
    InferenceClient::new(channel)
        .max_decoding_message_size(MAX_MESSAGE_BYTES)
        .max_encoding_message_size(MAX_MESSAGE_BYTES)
}

/// Watches and drains a worker of either role.
#[must_use]
pub fn worker(channel: Channel) -> WorkerClient<Channel> {
    WorkerClient::new(channel)
}

/// Calls a prefill worker.
#[must_use]
pub fn prefill(channel: Channel) -> PrefillClient<Channel> {
    PrefillClient::new(channel)
        .max_decoding_message_size(MAX_MESSAGE_BYTES)
        .max_encoding_message_size(MAX_MESSAGE_BYTES)
}

/// Calls a decode worker.
#[must_use]
pub fn decode(channel: Channel) -> DecodeClient<Channel> {
    DecodeClient::new(channel).max_decoding_message_size(MAX_MESSAGE_BYTES).max_encoding_message_size(MAX_MESSAGE_BYTES)
}
